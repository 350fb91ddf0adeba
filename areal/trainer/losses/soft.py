"""Policy losses that hold the policy back smoothly, without a clip. The rules of :mod:`~areal.trainer.losses.policy` hold."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.trainer.losses.numerics import at_trained, bounded, log_ratio, spread
from areal.trainer.losses.policy import PolicyLoss, RatioStats
from areal.utils.data import segment_sum


def dro_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.05,
    cu_seqlens: Tensor | None = None,
) -> PolicyLoss:
    """``-A log p + beta / 2 * (log p - log p_old)**2``.

    The policy's part of DRO (Richemond et al., 2024), where ``p_old`` is the reference, ``A`` the reward less its value and ``beta`` the
    paper's ``tau``: up to a constant it is ``(A - beta * (log p - log p_old))**2 / (2 * beta)``. Kimi k1.5 (2025) takes the policy before the
    update for ``p_old``. Nothing is exponentiated, so nothing is clamped.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        beta: at least 0.
        cu_seqlens: int32 ``[n + 1]``: the square is of the sequence's log-ratio, the sum over its trained tokens, as in both papers. Each token
            then has a share of the square, so that they add up to it (``SequenceMeanOfSums``). ``None``: the square is of each token.
    """
    log_r = log_ratio(logprobs, old_logprobs, mask)
    other = log_r if cu_seqlens is None else spread(segment_sum(log_r, cu_seqlens), cu_seqlens, len(mask))
    loss = 0.5 * beta * log_r * other - at_trained(advantages.detach(), mask) * at_trained(logprobs, mask)
    seen = bounded(log_r.detach())
    return PolicyLoss(loss, RatioStats(seen, seen.exp()))


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """``-f(r) A``, where ``f(r) = 4 / tau * sigmoid(tau * (r - 1))`` and ``r = p / p_old``.

    ``tau`` is ``tau_pos`` where ``A > 0``, else ``tau_neg``. SAPO (Gao et al., Qwen, 2025). At ``r = 1`` the slope of the gate is 1, and
    the gradient that of the policy gradient; away from it the gradient fades, sooner for a larger ``tau``.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        tau_pos, tau_neg: above 0.
    """
    gain = at_trained(advantages.detach(), mask)
    log_r = bounded(log_ratio(logprobs, old_logprobs, mask))
    ratio = log_r.exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill(gain > 0, tau_pos)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * gain
    return PolicyLoss(loss, RatioStats(log_r.detach(), ratio.detach()))
