"""PPO: the clipped objective of each token."""

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
class ClippedSurrogate:
    """``-sum(min(r A, clamp(r, low, high) A))`` with the ratio ``r = p / q`` (Schulman et al., 2017).

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``ppo``. The thresholds are ratios; the default 0.8 and 1.2 is an epsilon of
    0.2. Thresholds of each token are accepted under the same names as keys of a datum; the source does not describe them.
    """

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    inputs: ClassVar[frozenset[str]] = RATIO_KEYS
    optional: ClassVar[frozenset[str]] = CLIP_KEYS

    def __post_init__(self) -> None:
        check_thresholds("ppo", self.clip_low_threshold, self.clip_high_threshold)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs, advantages = target_logprobs(outputs), batch["advantages"]
        ratio = torch.exp(logprobs - batch["logprobs"])
        low, high = thresholds(batch, self.clip_low_threshold, self.clip_high_threshold)
        unclipped, bounded = ratio * advantages, clamped(ratio, low, high) * advantages
        # A target is clipped where the bound decides the minimum, and removes the gradient.
        return -torch.minimum(unclipped, bounded).sum(), sampling_ratio_metrics(logprobs, batch, bounded < unclipped)
