"""Rollout and trainer do not agree on log-probs: how far apart they are, and importance weights that correct for it.

An inference engine computes in other kernels and dtypes than the trainer, and may sample with older weights. The ratio
``rho = p_trainer / p_rollout`` of a sampled token corrects for it; cutting large ratios off bounds the variance at the price of some bias:
truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from areal.api import Batch, Metric
from areal.trainer.losses.inputs import refuse, required, required_like
from areal.trainer.losses.masked import (
    at_trained,
    bounded,
    log_ratio,
    mean_where,
    spread,
    token_max,
    token_mean,
    trained_positions,
)
from areal.utils.data import segment_mean, segment_sum

Level = Literal["token", "sequence", "geometric"]
"""One ratio for each token; for each sequence the product of its tokens' ratios; or their geometric mean."""

Mode = Literal["truncate", "mask"]
"""A weight beyond the bounds becomes the bound, or 0."""


class ImportanceWeights(NamedTuple):
    """Weights of tokens, without a gradient.

    Attributes:
        weights: ``[T]``, 0 where the mask is 0.
        ratio: ``[T]``, before bounds; 1 where the mask is 0 (at token level).
        truncated: bool ``[T]``, where a bound acted on a trained token.
    """

    weights: Tensor
    ratio: Tensor
    truncated: Tensor


def importance_weights(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: Level = "token",
    mode: Mode = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
) -> ImportanceWeights:
    """``rho = p_trainer / p_rollout``, bounded.

    ``truncate``: ``min(max(rho, floor), cap)``, of truncated importance sampling (Yao et al., 2025). ``mask``: ``rho`` within
    ``[floor, cap]`` and 0 outside, as the importance cap of AReaL (Fu et al., 2025) and, with both bounds, IcePop (Ring-1T, Ling Team,
    2025). What is masked stays in the denominator of an aggregation. Log-ratios, of a sequence their sum or mean, are clamped to
    ``LOG_RATIO_BOUND``.

    Args:
        trainer_logprobs, rollout_logprobs, mask: ``[T]``. cu_seqlens: int32 ``[n + 1]``.
        cap: largest weight; ``inf`` for none. floor: smallest.
    """
    log_rho = log_ratio(trainer_logprobs.detach(), rollout_logprobs, mask)
    keep = trained_positions(mask)
    if level == "sequence":
        log_rho = spread(segment_sum(log_rho, cu_seqlens), cu_seqlens, len(mask))
    elif level == "geometric":
        log_rho = spread(segment_mean(log_rho, cu_seqlens, weights=keep), cu_seqlens, len(mask))
    ratio = bounded(log_rho).exp()
    outside = (ratio > cap) | (ratio < floor)
    weights = ratio.masked_fill(outside, 0.0) if mode == "mask" else ratio.clamp(floor, cap)
    return ImportanceWeights(weights.masked_fill(~keep, 0.0), ratio, outside & keep)


class Mismatch(NamedTuple):
    """How far trainer and rollout are apart, on tokens that the rollout sampled; without a gradient.

    Attributes:
        k1, k3: ``[T]``, estimates of KL(rollout || trainer) in nats, from clamped log-ratios; 0 where the mask is 0.
        ratio: ``p_trainer / p_rollout``, ``[T]``; 1 where the mask is 0.
        log_perplexity_gap: ``[n]``, the trainer's mean negative log-prob of a sequence less the rollout's; 0 without a trained token.
        perplexity_gap: ``[n]``, the same of the perplexities.
    """

    k1: Tensor
    k3: Tensor
    ratio: Tensor
    log_perplexity_gap: Tensor
    perplexity_gap: Tensor


def compare_logprobs(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Mismatch:
    """Compare the log-probs of two engines for the same tokens and weights.

    Args:
        trainer_logprobs, rollout_logprobs, mask: ``[T]``. cu_seqlens: int32 ``[n + 1]``.
    """
    keep = trained_positions(mask)
    log_rho = bounded(log_ratio(trainer_logprobs.detach(), rollout_logprobs, mask))
    nll = [
        -segment_mean(at_trained(x.detach(), mask), cu_seqlens, weights=keep)
        for x in (trainer_logprobs, rollout_logprobs)
    ]
    return Mismatch(
        k1=-log_rho,
        k3=log_rho.expm1() - log_rho,
        ratio=log_rho.exp(),
        log_perplexity_gap=nll[0] - nll[1],
        perplexity_gap=bounded(nll[0]).exp() - bounded(nll[1]).exp(),
    )


def mismatch_metrics(found: Mismatch, mask: Tensor, cu_seqlens: Tensor) -> dict[str, Metric]:
    """``mismatch/k1``, ``k3``, ``ratio`` and ``ratio_max`` over trained tokens; ``log_perplexity_gap``, ``perplexity_gap`` over sequences."""
    sequences = segment_sum(trained_positions(mask), cu_seqlens) > 0
    return {
        "mismatch/k1": token_mean(found.k1, mask),
        "mismatch/k3": token_mean(found.k3, mask),
        "mismatch/ratio": token_mean(found.ratio, mask),
        "mismatch/ratio_max": token_max(found.ratio, mask, least=0.0),
        "mismatch/log_perplexity_gap": mean_where(found.log_perplexity_gap, sequences),
        "mismatch/perplexity_gap": mean_where(found.perplexity_gap, sequences),
    }


@dataclass(frozen=True)
class MismatchCorrection:
    """Truncated importance sampling between rollout and trainer: multiplies the policy loss of each token. Needs ``rollout_logprobs``.

    Attributes:
        level: one weight for each token, or for each sequence (product, or geometric mean).
        mode: what happens to weights out of bounds: ``truncate`` or ``mask``.
        cap, floor: bounds of the weight; ``inf`` for no cap.
        trainer: whose log-probs stand above the fraction: ``"old_logprobs"`` of the batch, or ``"logprobs"``, the present ones without
            their gradient (when there is one update for each rollout, and old log-probs are not computed).

    Raises:
        ValueError: an option is out of range.
    """

    level: Level = "token"
    mode: Mode = "truncate"
    cap: float = 2.0
    floor: float = 0.0
    trainer: Literal["old_logprobs", "logprobs"] = "old_logprobs"

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence", "geometric"):
            refuse("MismatchCorrection.level", self.level, "choose 'token', 'sequence' or 'geometric'")
        if self.mode not in ("truncate", "mask"):
            refuse("MismatchCorrection.mode", self.mode, "choose 'truncate' or 'mask'")
        if not self.cap > 0:
            refuse("MismatchCorrection.cap", self.cap, "give a positive number, or inf for no cap")
        if not 0 <= self.floor <= self.cap or math.isinf(self.floor):
            refuse("MismatchCorrection.floor", self.floor, f"give a number from 0 to the cap {self.cap}")
        if self.trainer not in ("old_logprobs", "logprobs"):
            refuse("MismatchCorrection.trainer", self.trainer, "choose 'old_logprobs' or 'logprobs'")

    def __call__(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """Weights ``[T]`` for one micro-batch, and the metrics of the mismatch with ``mismatch/truncated``, the share of bounded tokens.

        Raises:
            ValueError: the batch lacks ``rollout_logprobs``, ``old_logprobs`` or ``loss_mask``.
        """
        mask = required(batch, "loss_mask")
        trainer = logprobs.detach() if self.trainer == "logprobs" else required_like(batch, "old_logprobs", logprobs)
        rollout = required_like(batch, "rollout_logprobs", logprobs)
        found = importance_weights(
            trainer, rollout, mask, batch.cu_seqlens, level=self.level, mode=self.mode, cap=self.cap, floor=self.floor
        )
        metrics = mismatch_metrics(compare_logprobs(trainer, rollout, mask, batch.cu_seqlens), mask, batch.cu_seqlens)
        metrics["mismatch/truncated"] = token_mean(found.truncated, mask)
        metrics["mismatch/weight"] = token_mean(found.weights, mask)
        return found.weights, metrics
