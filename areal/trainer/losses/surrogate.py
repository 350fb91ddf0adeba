"""Policy losses with their options, ready to be called on a batch: what :func:`policy_objective` is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from areal.api import Batch
from areal.trainer.losses.gspo import gspo_loss, gspo_token_loss
from areal.trainer.losses.keys import OldLogprobs, refuse, required_like
from areal.trainer.losses.policy import (
    PolicyLoss,
    cispo_loss,
    importance_sampling_loss,
    policy_gradient_loss,
    ppo_clip_loss,
)
from areal.trainer.losses.soft import dro_loss, sapo_loss


class Surrogate(Protocol):
    """A policy loss with its options."""

    @property
    def old(self) -> str | None:
        """The batch key of the log-probs that its ratio is taken against; ``None`` without a ratio."""
        ...

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        """The loss of each token of one micro-batch, from log-probs ``[T]``.

        Raises:
            ValueError: the batch lacks a key, or it is of another shape.
        """
        ...


def check_clip(owner: str, low: float, high: float) -> None:
    """Raise a ``ValueError`` where a bound is negative or no number."""
    for field, value in (("clip_low", low), ("clip_high", high)):
        if not value >= 0:
            refuse(f"{owner}.{field}", value, "give a number of at least 0, or inf for no bound")


def check_old(owner: str, old: str, *more: str) -> None:
    """Raise a ``ValueError`` where ``old`` is no key of old log-probs."""
    known = ("old_logprobs", "rollout_logprobs", *more)
    if old not in known:
        refuse(f"{owner}.old", old, f"choose one of {list(known)}")


def _against(logprobs: Tensor, batch: Batch, old: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, advantages and mask."""
    found = [required_like(batch, key, logprobs) for key in (old, "advantages", "loss_mask")]
    return logprobs, found[0], found[1], found[2]


@dataclass(frozen=True)
class PolicyGradient:
    """:func:`policy_gradient_loss`: ``-A log p``, on-policy only."""

    @property
    def old(self) -> str | None:
        """There is no ratio."""
        return None

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        return policy_gradient_loss(
            logprobs, required_like(batch, "advantages", logprobs), required_like(batch, "loss_mask", logprobs)
        )


@dataclass(frozen=True)
class ImportanceSampling:
    """:func:`importance_sampling_loss`: ``-r A``, against the policy that sampled."""

    old: OldLogprobs = "rollout_logprobs"

    def __post_init__(self) -> None:
        check_old("ImportanceSampling", self.old)

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        return importance_sampling_loss(*_against(logprobs, batch, self.old))


@dataclass(frozen=True)
class PPOClip:
    """:func:`ppo_clip_loss`: PPO's clip, perhaps with a higher upper bound, perhaps with dual clip."""

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
        inputs = _against(logprobs, batch, self.old)
        return ppo_clip_loss(*inputs, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)


@dataclass(frozen=True)
class GSPO:
    """:func:`gspo_loss`, or with ``per_token`` :func:`gspo_token_loss`, for advantages that differ within a sequence."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    per_token: bool = False
    old: OldLogprobs = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("GSPO", self.old)
        check_clip("GSPO", self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        fn = gspo_token_loss if self.per_token else gspo_loss
        inputs = _against(logprobs, batch, self.old)
        return fn(*inputs, batch.cu_seqlens, clip_low=self.clip_low, clip_high=self.clip_high)


@dataclass(frozen=True)
class CISPO:
    """:func:`cispo_loss`: the importance weight is clipped, never the gradient."""

    clip_low: float = math.inf
    clip_high: float = 4.0
    old: OldLogprobs = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("CISPO", self.old)
        check_clip("CISPO", self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        inputs = _against(logprobs, batch, self.old)
        return cispo_loss(*inputs, clip_low=self.clip_low, clip_high=self.clip_high)


@dataclass(frozen=True)
class DRO:
    """:func:`dro_loss`: a quadratic penalty on the log-ratio, of each token or, with ``sequence``, of each sequence."""

    beta: float = 0.05
    sequence: bool = False
    old: Literal["old_logprobs", "rollout_logprobs", "ref_logprobs"] = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("DRO", self.old, "ref_logprobs")
        if not 0 <= self.beta < math.inf:
            refuse("DRO.beta", self.beta, "give a finite number of at least 0")

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        inputs = _against(logprobs, batch, self.old)
        return dro_loss(*inputs, beta=self.beta, cu_seqlens=batch.cu_seqlens if self.sequence else None)


@dataclass(frozen=True)
class SAPO:
    """:func:`sapo_loss`: a smooth gate in place of the clip."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    old: OldLogprobs = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("SAPO", self.old)
        for field, value in (("tau_pos", self.tau_pos), ("tau_neg", self.tau_neg)):
            if not 0 < value < math.inf:
                refuse(f"SAPO.{field}", value, "give a finite number above 0")

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        return sapo_loss(*_against(logprobs, batch, self.old), tau_pos=self.tau_pos, tau_neg=self.tau_neg)
