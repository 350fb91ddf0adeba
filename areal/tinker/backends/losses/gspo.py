"""GSPO: the clipped objective with one ratio per sequence."""

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
from areal.utils.data.segments import segment_sum


@dataclass(frozen=True)
class SequenceRatio:
    """``-sum(min(s_t A, clamp(s_t, low, high) A))`` with ``s_t = exp(mean_M(log p - log q) + log p_t - sg(log p_t))`` (Zheng et al., 2025).

    The mean is over the targets of the sequence that ``sequence_ratio_mask`` marks (not 0), without a gradient. The ratio of each target equals
    that of its sequence and has the gradient of the target's own log-prob (GSPO-token of the paper).

    Source: https://tinker-docs.thinkingmachines.ai/tinker/losses/gspo. Defaults of the thresholds are not known to us: 1 - 3e-4 and 1 + 4e-4
    are the paper's.
    """

    clip_low_threshold: float = 1 - 3e-4
    clip_high_threshold: float = 1 + 4e-4
    inputs: ClassVar[frozenset[str]] = RATIO_KEYS | {"sequence_ratio_mask"}
    optional: ClassVar[frozenset[str]] = CLIP_KEYS

    def __post_init__(self) -> None:
        check_thresholds("gspo", self.clip_low_threshold, self.clip_high_threshold)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs, advantages = target_logprobs(outputs), batch["advantages"]
        # The mean of each sequence, repeated for its tokens. Without marked targets it is 0.
        marked = (batch["sequence_ratio_mask"] != 0).to(logprobs.dtype)
        difference = (logprobs.detach() - batch["logprobs"]) * marked
        sums = [segment_sum(x.flatten(1).sum(1) if x.dim() > 1 else x, batch.cu_seqlens) for x in (difference, marked)]
        lengths = batch.cu_seqlens.diff().long()
        means = (sums[0] / sums[1].clamp(min=1)).repeat_interleave(lengths, output_size=len(logprobs))
        means = means.reshape(-1, *[1] * (logprobs.dim() - 1))
        # The clipped objective of PPO, with the ratio of the sequence.
        ratio = torch.exp(means + logprobs - logprobs.detach())
        low, high = thresholds(batch, self.clip_low_threshold, self.clip_high_threshold)
        unclipped, bounded = ratio * advantages, clamped(ratio, low, high) * advantages
        return -torch.minimum(unclipped, bounded).sum(), sampling_ratio_metrics(logprobs, batch, bounded < unclipped)
