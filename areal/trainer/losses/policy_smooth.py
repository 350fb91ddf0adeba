"""Policy losses that limit an update smoothly instead of clipping: DRO and SAPO. Conventions of :mod:`~areal.trainer.losses.policy`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.api import Batch
from areal.trainer.losses.inputs import OldLogprobs, refuse
from areal.trainer.losses.masked import at_trained, bounded, log_ratio, spread
from areal.trainer.losses.policy import PolicyLoss, RatioStats, check_old, policy_inputs
from areal.utils.data import segment_sum

# ---- DRO


def dro_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.05,
    cu_seqlens: Tensor | None = None,
) -> PolicyLoss:
    """Return ``-A log p + beta / 2 * (log p - log p_old)**2``.

    The policy term of DRO (Richemond et al., 2024): ``p_old`` is the reference, ``A`` the reward minus its value, ``beta`` the paper's
    ``tau``. Up to a constant it equals ``(A - beta * (log p - log p_old))**2 / (2 * beta)``. Kimi k1.5 (2025) uses the policy before the
    update as ``p_old``. Nothing is clamped, because the loss is without an exponential.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        beta: at least 0.
        cu_seqlens: int32 ``[n + 1]`` squares the log-ratio of the sequence (the sum over its trained tokens), as in both papers. Each
            token has one summand of the square, for ``SequenceMeanOfSums``. ``None`` squares the log-ratio of each token.
    """
    log_r = log_ratio(logprobs, old_logprobs, mask)
    # (sum_t x_t)^2 = sum_t x_t * (sum_u x_u): each token has one summand of the sequence's square.
    other = log_r if cu_seqlens is None else spread(segment_sum(log_r, cu_seqlens), cu_seqlens, len(mask))
    loss = 0.5 * beta * log_r * other - at_trained(advantages.detach(), mask) * at_trained(logprobs, mask)
    # The clamp is for the metrics alone, which report a ratio.
    log_r_reported = bounded(log_r.detach())
    return PolicyLoss(loss, RatioStats(log_r_reported, log_r_reported.exp()))


@dataclass(frozen=True)
class DRO:
    """Surrogate of :func:`dro_loss`: a quadratic penalty on the log-ratio of each token or, with ``sequence``, of each sequence."""

    beta: float = 0.05
    sequence: bool = False
    old: Literal["old_logprobs", "rollout_logprobs", "ref_logprobs"] = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("DRO", self.old, "ref_logprobs")
        if not 0 <= self.beta < math.inf:
            refuse("DRO.beta", self.beta, "give a finite number of at least 0")

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        inputs = policy_inputs(logprobs, batch, self.old)
        return dro_loss(*inputs, beta=self.beta, cu_seqlens=batch.cu_seqlens if self.sequence else None)


# ---- SAPO


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """Return ``-f(r) A``, where ``f(r) = 4 / tau * sigmoid(tau * (r - 1))`` and ``r = p / p_old``.

    ``tau`` is ``tau_pos`` where ``A > 0``, else ``tau_neg``. SAPO (Gao et al., Qwen, 2025). At ``r = 1`` the slope of ``f`` is 1, and the
    gradient is that of the policy gradient. It fades with the distance of ``r`` from 1, faster for a larger ``tau``.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        tau_pos, tau_neg: above 0.
    """
    gain = at_trained(advantages.detach(), mask)
    log_r = bounded(log_ratio(logprobs, old_logprobs, mask))
    ratio = log_r.exp()
    # At A = 0 the loss is 0 for either temperature.
    tau = torch.full_like(ratio, tau_neg).masked_fill(gain > 0, tau_pos)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * gain
    return PolicyLoss(loss, RatioStats(log_r.detach(), ratio.detach()))


@dataclass(frozen=True)
class SAPO:
    """Surrogate of :func:`sapo_loss`: a smooth gate instead of a clip."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    old: OldLogprobs = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("SAPO", self.old)
        for field, value in (("tau_pos", self.tau_pos), ("tau_neg", self.tau_neg)):
            if not 0 < value < math.inf:
                refuse(f"SAPO.{field}", value, "give a finite number above 0")

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        return sapo_loss(*policy_inputs(logprobs, batch, self.old), tau_pos=self.tau_pos, tau_neg=self.tau_neg)
