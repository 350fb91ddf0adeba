"""Policy losses of one ratio for each token: policy gradient, importance sampling, PPO's clip.

All return per-token losses ``[T]``, neither summed nor scaled: exactly 0, without a gradient, where the mask is 0, whatever stands there.
Only where the mask is 0 matters here; aggregations weigh with it. Advantages and old log-probs have no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from areal.trainer.losses.numerics import at_trained, bounded, log_ratio, trained_positions


class RatioStats(NamedTuple):
    """What a policy loss did to each token; without a gradient. All ``[T]``; at positions of mask 0 a ratio is 1 and nothing is clipped.

    Attributes:
        log_ratio: ``log p - log p_old`` of what the loss takes for its ratio, clamped.
        ratio: its exponential.
        clipped_low, clipped_high: bool, where the lower or the upper bound took the gradient (for CISPO: bounded the weight).
        dual_clipped: bool, where the second bound of dual clip did.
    """

    log_ratio: Tensor
    ratio: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None
    dual_clipped: Tensor | None = None


class PolicyLoss(NamedTuple):
    """A per-token loss ``[T]`` and, where the loss has a ratio, its statistics."""

    per_token: Tensor
    stats: RatioStats | None = None


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """``-A log p`` (REINFORCE, Williams, 1992): on-policy only.

    Args:
        logprobs, advantages, mask: ``[T]``.
    """
    return PolicyLoss(-at_trained(advantages.detach(), mask) * at_trained(logprobs, mask))


def importance_sampling_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """``-r A`` with ``r = p / p_old``: the policy gradient off-policy, without a bound on the ratio but ``LOG_RATIO_BOUND``.

    Its gradient is ``-r A grad log p``; where ``r`` is 1, that of :func:`policy_gradient_loss`. ``p_old`` is the policy that sampled.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
    """
    log_r = bounded(log_ratio(logprobs, old_logprobs, mask))
    ratio = log_r.exp()
    return PolicyLoss(-ratio * at_trained(advantages.detach(), mask), RatioStats(log_r.detach(), ratio.detach()))


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = p / p_old`` (PPO, Schulman et al., 2017, equation 7).

    ``clip_high`` above ``clip_low`` is clip-higher of DAPO (Yu et al., 2025). With ``dual_clip = c``, where ``A < 0`` the gain is at least
    ``c A`` (Ye et al., 2020, equation 5): a ratio above ``c`` then has no gradient.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        clip_low, clip_high: at least 0; ``inf`` for no bound.
        dual_clip: above 1, such as 3; ``None`` for none.
    """
    return clipped_loss(
        log_ratio(logprobs, old_logprobs, mask),
        at_trained(advantages.detach(), mask),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def clipped_loss(
    log_ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """PPO's clip for any log-ratios and advantages of one shape, without NaNs. See :func:`ppo_clip_loss`."""
    log_r = bounded(log_ratios)
    ratio = log_r.exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    up, down = advantages > 0, advantages < 0
    dual = torch.zeros_like(down)
    if dual_clip is not None:
        gain = torch.where(down, torch.maximum(gain, dual_clip * advantages), gain)
        dual = down & (ratio > dual_clip)
    clipped_low, clipped_high = down & (ratio < 1 - clip_low), up & (ratio > 1 + clip_high)
    return PolicyLoss(-gain, RatioStats(log_r.detach(), ratio.detach(), clipped_low, clipped_high, dual))


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = float("inf"),
    clip_high: float = 4.0,
) -> PolicyLoss:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p`` with ``r = p / p_old``: no token loses its gradient.

    ``sg`` stops the gradient. CISPO of MiniMax-M1 (2025), equations 4 and 5, which has no lower bound; the default upper bound of 5 is that of
    ScaleRL (Khatri et al., 2025).

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        clip_low, clip_high: at least 0; ``inf`` for no bound.
    """
    log_r = bounded(log_ratio(logprobs.detach(), old_logprobs, mask))
    ratio, keep = log_r.exp(), trained_positions(mask)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * at_trained(advantages.detach(), mask) * at_trained(logprobs, mask)
    return PolicyLoss(loss, RatioStats(log_r, ratio, keep & (ratio < 1 - clip_low), keep & (ratio > 1 + clip_high)))
