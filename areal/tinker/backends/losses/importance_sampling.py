"""Importance sampling: policy gradient with the ratio to the sampling policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.tinker.backends.losses.loss_interface import RATIO_KEYS, sampling_ratio_metrics, target_logprobs


@dataclass(frozen=True)
class ImportanceWeighted:
    """``-sum(p / q * A)`` with ``p / q = exp(logprobs of the model - logprobs of the sampler)``.

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``importance_sampling``.
    """

    inputs: ClassVar[frozenset[str]] = RATIO_KEYS
    optional: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs = target_logprobs(outputs)
        ratio = torch.exp(logprobs - batch["logprobs"])
        return -(ratio * batch["advantages"]).sum(), sampling_ratio_metrics(logprobs, batch)
