"""CISPO: policy gradient weighted by a clipped ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.tinker.backends.losses.loss_interface import (
    CLIP_KEYS,
    RATIO_KEYS,
    check_thresholds,
    clamped,
    sampling_ratio_metrics,
    target_logprobs,
    thresholds,
)


@dataclass(frozen=True)
class ClippedWeight:
    """``-sum(sg(clamp(r, low, high)) * logprobs * A)`` with the ratio ``r = p / q``, where ``sg`` stops the gradient (MiniMax-M1, 2025).

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``cispo``. The thresholds are ratios. The source states no default: 0 and 4
    is its recommendation for off-policy training, a bound on one side only (ScaleRL, 2025, is insensitive to 4, 5 or 8). Thresholds of each
    token are accepted under the same names as keys of a datum.
    """

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0
    inputs: ClassVar[frozenset[str]] = RATIO_KEYS
    optional: ClassVar[frozenset[str]] = CLIP_KEYS

    def __post_init__(self) -> None:
        check_thresholds("cispo", self.clip_low_threshold, self.clip_high_threshold)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs = target_logprobs(outputs)
        ratio = torch.exp(logprobs.detach() - batch["logprobs"])
        weight = clamped(ratio, *thresholds(batch, self.clip_low_threshold, self.clip_high_threshold))
        return -(weight * logprobs * batch["advantages"]).sum(), sampling_ratio_metrics(
            logprobs, batch, weight != ratio
        )
