"""Policy losses with one ratio per token: policy gradient, importance sampling, PPO's clip, CISPO.

Each loss exists twice. A pure function of ``[T]`` tensors (``ppo_clip_loss``) is for a loss function of your own. A frozen dataclass with
the options of that function (:class:`PPOClip`), a :class:`Surrogate`, is for :func:`policy_objective`.

All functions return per-token losses ``[T]``, neither summed nor scaled. They are exactly 0, without a gradient, where the mask is 0;
aggregations apply its other weights. Advantages and old log-probs get no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from areal.api import Batch
from areal.trainer.losses.inputs import OldLogprobs, ratio_denominator, refuse, required_like
from areal.trainer.losses.masked import at_trained, bounded, log_ratio, trained_positions


class RatioStats(NamedTuple):
    """Statistics of a loss's ratio at each token, ``[T]``, without a gradient. At mask 0 the ratio is 1 and nothing is clipped.

    Attributes:
        log_ratio: float. ``log p - log p_old`` as the loss uses it, clamped.
        ratio: float. Its exponential.
        clipped_low, clipped_high: bool. The lower or upper bound removed the gradient (for CISPO: bounded the weight).
        dual_clipped: bool. The bound of dual clip removed the gradient.
    """

    log_ratio: Tensor
    ratio: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None
    dual_clipped: Tensor | None = None


class PolicyLoss(NamedTuple):
    """A per-token loss ``[T]`` and, if the loss has a ratio, its statistics."""

    per_token: Tensor
    stats: RatioStats | None = None


class Surrogate(Protocol):
    """A policy loss with its options, called once per micro-batch. Any callable object with an attribute ``old`` is one::

    @dataclass(frozen=True)
    class Squared:
        old: str | None = "old_logprobs"

        def __call__(self, logprobs, batch):
            return PolicyLoss(squared_loss(*policy_inputs(logprobs, batch, self.old)))
    """

    @property
    def old(self) -> str | None:
        """Log-probs in the denominator of the ratio, such as a batch key; ``None`` for a loss without a ratio."""
        ...

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        """Return the loss of each token of a micro-batch.

        Args:
            logprobs: float ``[T]``. The current policy's log-probs, with a gradient.
            batch: packed micro-batch.

        Raises:
            ValueError: a key is missing in the batch, or has another shape.
        """
        ...


def policy_inputs(logprobs: Tensor, batch: Batch, old: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(logprobs, old log-probs, advantages, loss_mask)``, each checked to be ``[T]``: the arguments of a loss with a ratio.

    Raises:
        ValueError: a key is missing in the batch, or has another shape.
    """
    advantages, mask = (required_like(batch, key, logprobs) for key in ("advantages", "loss_mask"))
    return logprobs, ratio_denominator(batch, old, logprobs), advantages, mask


def check_clip(owner: str, low: float, high: float) -> None:
    """Raise a ``ValueError`` if a clip bound of the surrogate ``owner`` is negative or NaN."""
    for field, value in (("clip_low", low), ("clip_high", high)):
        if not value >= 0:
            refuse(f"{owner}.{field}", value, "give a number of at least 0, or inf for no bound")


def check_old(owner: str, old: str, *more: str) -> None:
    """Raise a ``ValueError`` if ``old`` is neither a key of :data:`OldLogprobs` nor one of ``more``."""
    known = (*get_args(OldLogprobs), *more)
    if old not in known:
        refuse(f"{owner}.old", old, f"choose one of {list(known)}")


# ---- policy gradient


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """Return ``-A log p`` (REINFORCE, Williams, 1992). On-policy only.

    Args:
        logprobs, advantages, mask: ``[T]``.
    """
    return PolicyLoss(-at_trained(advantages.detach(), mask) * at_trained(logprobs, mask))


@dataclass(frozen=True)
class PolicyGradient:
    """Surrogate of :func:`policy_gradient_loss`: ``-A log p``, on-policy only."""

    @property
    def old(self) -> str | None:
        """``None``, because the loss is without a ratio."""
        return None

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        advantages, mask = (required_like(batch, key, logprobs) for key in ("advantages", "loss_mask"))
        return policy_gradient_loss(logprobs, advantages, mask)


# ---- importance sampling


def importance_sampling_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """Return ``-r A`` with ``r = p / p_old``: the off-policy policy gradient, with no bound on the ratio except ``LOG_RATIO_BOUND``.

    Its gradient is ``-r A grad log p``, which equals that of :func:`policy_gradient_loss` where ``r`` is 1. ``p_old`` is the policy that
    sampled.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
    """
    log_r = bounded(log_ratio(logprobs, old_logprobs, mask))
    ratio = log_r.exp()
    return PolicyLoss(-ratio * at_trained(advantages.detach(), mask), RatioStats(log_r.detach(), ratio.detach()))


@dataclass(frozen=True)
class ImportanceSampling:
    """Surrogate of :func:`importance_sampling_loss`: ``-r A``, with the ratio to the policy that sampled."""

    old: OldLogprobs = "rollout_logprobs"

    def __post_init__(self) -> None:
        check_old("ImportanceSampling", self.old)

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        return importance_sampling_loss(*policy_inputs(logprobs, batch, self.old))


# ---- PPO


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
    """Return ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = p / p_old`` (PPO, Schulman et al., 2017, equation 7).

    ``clip_high`` above ``clip_low`` is the clip-higher of DAPO (Yu et al., 2025). With ``dual_clip = c``, the gain where ``A < 0`` is at
    least ``c A`` (Ye et al., 2020, equation 5), so that the gradient at a ratio above ``c`` is 0.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        clip_low, clip_high: at least 0; ``inf`` for no bound.
        dual_clip: above 1, such as 3; ``None`` for no dual clip.
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
    """Apply PPO's clip to log-ratios and advantages of one shape, both free of NaN. See :func:`ppo_clip_loss`."""
    log_r = bounded(log_ratios)
    ratio = log_r.exp()
    # The pessimistic bound: the minimum of the clipped and the unclipped gain.
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    up, down = advantages > 0, advantages < 0
    # For A < 0 that minimum is unbounded from below in r; dual clip adds a bound.
    dual = torch.zeros_like(down)
    if dual_clip is not None:
        gain = torch.where(down, torch.maximum(gain, dual_clip * advantages), gain)
        dual = down & (ratio > dual_clip)
    # A bound removes the gradient only on the side to which the advantage pushes.
    clipped_low, clipped_high = down & (ratio < 1 - clip_low), up & (ratio > 1 + clip_high)
    return PolicyLoss(-gain, RatioStats(log_r.detach(), ratio.detach(), clipped_low, clipped_high, dual))


@dataclass(frozen=True)
class PPOClip:
    """Surrogate of :func:`ppo_clip_loss`: PPO's clip, optionally with a higher upper bound or dual clip."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    old: OldLogprobs = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("PPOClip", self.old)
        check_clip("PPOClip", self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            refuse("PPOClip.dual_clip", self.dual_clip, "give a ratio above 1, such as 3, or None for none")

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        inputs = policy_inputs(logprobs, batch, self.old)
        return ppo_clip_loss(*inputs, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)


# ---- CISPO


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = float("inf"),
    clip_high: float = 4.0,
) -> PolicyLoss:
    """Return ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p`` with ``r = p / p_old``: every token keeps its gradient.

    ``sg`` stops the gradient. CISPO of MiniMax-M1 (2025), equations 4 and 5, without a lower bound. The default upper bound of 5 is that
    of ScaleRL (Khatri et al., 2025).

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        clip_low, clip_high: at least 0; ``inf`` for no bound.
    """
    # The weight is a constant: the gradient comes from log p alone.
    log_r = bounded(log_ratio(logprobs.detach(), old_logprobs, mask))
    ratio, keep = log_r.exp(), trained_positions(mask)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * at_trained(advantages.detach(), mask) * at_trained(logprobs, mask)
    return PolicyLoss(loss, RatioStats(log_r, ratio, keep & (ratio < 1 - clip_low), keep & (ratio > 1 + clip_high)))


@dataclass(frozen=True)
class CISPO:
    """Surrogate of :func:`cispo_loss`: clips the importance weight, never the gradient."""

    clip_low: float = math.inf
    clip_high: float = 4.0
    old: OldLogprobs = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("CISPO", self.old)
        check_clip("CISPO", self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        inputs = policy_inputs(logprobs, batch, self.old)
        return cispo_loss(*inputs, clip_low=self.clip_low, clip_high=self.clip_high)
