"""Mismatch between the log-probs of rollout and trainer: statistics, and importance weights that correct for it.

An inference engine uses other kernels and dtypes than the trainer, and may sample with older weights. The ratio
``rho = p_trainer / p_rollout`` of a sampled token corrects for both. Bounding large ratios reduces the variance and adds some bias:
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
"""One ratio per token; or, per sequence, the product of its tokens' ratios or their geometric mean."""

Mode = Literal["truncate", "mask"]
"""Replace a weight out of bounds by the bound (``truncate``) or by 0 (``mask``)."""


class ImportanceWeights(NamedTuple):
    """Importance weights of tokens, without a gradient.

    Attributes:
        weights: float ``[T]``. 0 where the mask is 0.
        ratio: float ``[T]``. Before the bounds; 1 where the mask is 0 (at token level).
        truncated: bool ``[T]``. True where a bound changed the weight of a trained token.
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
    """Return ``rho = p_trainer / p_rollout``, bounded.

    ``truncate``: ``min(max(rho, floor), cap)``, of truncated importance sampling (Yao et al., 2025). ``mask``: ``rho`` within
    ``[floor, cap]`` and 0 outside, as the importance cap of AReaL (Fu et al., 2025) and, with both bounds, IcePop (Ring-1T, Ling Team,
    2025). Masked tokens still count in the denominator of an aggregation. Log-ratios (per sequence their sum or mean) are clamped to
    ``LOG_RATIO_BOUND``.

    Args:
        trainer_logprobs, rollout_logprobs, mask: ``[T]``.
        cu_seqlens: int32 ``[n + 1]``.
        level: unit that has one ratio.
        mode: treatment of weights out of bounds.
        cap: largest weight; ``inf`` for no bound.
        floor: smallest weight.
    """
    # 1. The log-ratio of each token, replaced by that of its sequence if asked for.
    log_rho = log_ratio(trainer_logprobs.detach(), rollout_logprobs, mask)
    keep = trained_positions(mask)
    if level == "sequence":
        log_rho = spread(segment_sum(log_rho, cu_seqlens), cu_seqlens, len(mask))
    elif level == "geometric":
        log_rho = spread(segment_mean(log_rho, cu_seqlens, weights=keep), cu_seqlens, len(mask))
    # 2. The bounds.
    ratio = bounded(log_rho).exp()
    outside = (ratio > cap) | (ratio < floor)
    weights = ratio.masked_fill(outside, 0.0) if mode == "mask" else ratio.clamp(floor, cap)
    return ImportanceWeights(weights.masked_fill(~keep, 0.0), ratio, outside & keep)


class Mismatch(NamedTuple):
    """Difference of trainer and rollout on sampled tokens, without a gradient.

    Attributes:
        k1, k3: ``[T]``. Estimates of KL(rollout || trainer) in nats, from clamped log-ratios; 0 where the mask is 0.
        ratio: ``[T]``. ``p_trainer / p_rollout``; 1 where the mask is 0.
        log_perplexity_gap: ``[n]``. Mean negative log-prob of a sequence, trainer minus rollout; 0 without a trained token.
        perplexity_gap: ``[n]``. Difference of the perplexities.
    """

    k1: Tensor
    k3: Tensor
    ratio: Tensor
    log_perplexity_gap: Tensor
    perplexity_gap: Tensor


def compare_logprobs(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Mismatch:
    """Compare the log-probs of trainer and rollout for the same tokens.

    Args:
        trainer_logprobs, rollout_logprobs, mask: ``[T]``.
        cu_seqlens: int32 ``[n + 1]``.
    """
    keep = trained_positions(mask)
    log_rho = bounded(log_ratio(trainer_logprobs.detach(), rollout_logprobs, mask))
    # The mean negative log-prob of each sequence is its log-perplexity.
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


def mismatch_metrics(mismatch: Mismatch, mask: Tensor, cu_seqlens: Tensor) -> dict[str, Metric]:
    """Return ``mismatch/k1``, ``k3``, ``ratio``, ``ratio_max`` over tokens, and ``log_perplexity_gap``, ``perplexity_gap`` over sequences."""
    sequences = segment_sum(trained_positions(mask), cu_seqlens) > 0
    return {
        "mismatch/k1": token_mean(mismatch.k1, mask),
        "mismatch/k3": token_mean(mismatch.k3, mask),
        "mismatch/ratio": token_mean(mismatch.ratio, mask),
        "mismatch/ratio_max": token_max(mismatch.ratio, mask, least=0.0),
        "mismatch/log_perplexity_gap": mean_where(mismatch.log_perplexity_gap, sequences),
        "mismatch/perplexity_gap": mean_where(mismatch.perplexity_gap, sequences),
    }


@dataclass(frozen=True)
class MismatchCorrection:
    """Importance weights between rollout and trainer that multiply the policy loss of each token. Needs ``rollout_logprobs``.

    Attributes:
        level: one weight per token, or per sequence (product, or geometric mean).
        mode: treatment of weights out of bounds: ``truncate`` or ``mask``.
        cap, floor: bounds of the weight; ``inf`` for no cap.
        trainer: numerator of the ratio. ``"old_logprobs"`` of the batch, which the trainer must compute: with the rollout's in their
            place the ratio is 1. Or ``"logprobs"``, the current ones without their gradient, for one update per batch, where old log-probs
            are not computed: with a surrogate of ``old="logprobs"``.

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
        """Return weights ``[T]`` of a micro-batch, and :func:`mismatch_metrics` with ``mismatch/truncated``, the fraction of bounded tokens.

        Raises:
            ValueError: the batch lacks ``rollout_logprobs``, ``old_logprobs`` or ``loss_mask``.
        """
        # 1. The ratio's numerator, without a gradient in either case.
        mask = required(batch, "loss_mask")
        trainer = logprobs.detach() if self.trainer == "logprobs" else required_like(batch, "old_logprobs", logprobs)
        rollout = required_like(batch, "rollout_logprobs", logprobs)
        # 2. Weights for the loss.
        importance = importance_weights(
            trainer, rollout, mask, batch.cu_seqlens, level=self.level, mode=self.mode, cap=self.cap, floor=self.floor
        )
        # 3. The mismatch as it is, before any bound.
        metrics = mismatch_metrics(compare_logprobs(trainer, rollout, mask, batch.cu_seqlens), mask, batch.cu_seqlens)
        metrics["mismatch/truncated"] = token_mean(importance.truncated, mask)
        metrics["mismatch/weight"] = token_mean(importance.weights, mask)
        return importance.weights, metrics
