"""Policy losses with one ratio per sequence: GSPO. Conventions of :mod:`~areal.trainer.losses.policy`: per token, 0 where the mask is 0."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from areal.api import Batch
from areal.trainer.losses.inputs import OldLogprobs
from areal.trainer.losses.masked import at_trained, log_ratio, spread, trained_positions
from areal.trainer.losses.policy import PolicyLoss, check_clip, check_old, clipped_loss, policy_inputs
from areal.utils.data import segment_mean


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """Return ``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``, where ``s = exp(mean_t (log p - log p_old))`` over trained tokens.

    GSPO (Zheng et al., 2025), equations 5 and 7. ``A`` is the mean of a sequence's advantages over its trained tokens, which should all
    be equal. Each trained token has the loss of its sequence: with :class:`~areal.trainer.losses.aggregate.SequenceMean` the result is the
    paper's objective, with ``SequenceMeanOfSums`` that of LUSPO (2026), which weights by length.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        cu_seqlens: int32 ``[n + 1]``.
        clip_low, clip_high: at least 0; ``inf`` for no bound. Small, because a mean over many tokens hardly changes.
    """
    # Means over trained tokens only: the weights are 0 elsewhere.
    keep = trained_positions(mask)
    log_s = segment_mean(log_ratio(logprobs, old_logprobs, mask), cu_seqlens, weights=keep)
    advantage = segment_mean(at_trained(advantages.detach(), mask), cu_seqlens, weights=keep)
    # Back to tokens, so that an aggregation can sum them.
    of_tokens = [at_trained(spread(x, cu_seqlens, len(mask)), mask) for x in (log_s, advantage)]
    return clipped_loss(*of_tokens, clip_low=clip_low, clip_high=clip_high)


def gspo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """Return GSPO's loss with an advantage for each token: the clip of ``s_t = sg(s) p_t / sg(p_t)``.

    ``sg`` stops the gradient: the value of ``s_t`` is ``s``, and its gradient is that of the token. GSPO-token (Zheng et al., 2025),
    equations 13 and 14. With equal advantages in a sequence and :class:`~areal.trainer.losses.aggregate.SequenceMean`, value and gradient
    equal those of :func:`gspo_loss`.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``.
        cu_seqlens: int32 ``[n + 1]``.
        clip_low, clip_high: at least 0; ``inf`` for no bound.
    """
    keep = trained_positions(mask)
    log_s = segment_mean(log_ratio(logprobs.detach(), old_logprobs, mask), cu_seqlens, weights=keep)
    # log p - sg(log p): the value is 0, the gradient is that of the token's log-prob.
    of_token = at_trained(logprobs, mask) - at_trained(logprobs.detach(), mask)
    log_s_token = at_trained(spread(log_s, cu_seqlens, len(mask)), mask) + of_token
    return clipped_loss(log_s_token, at_trained(advantages.detach(), mask), clip_low=clip_low, clip_high=clip_high)


@dataclass(frozen=True)
class GSPO:
    """Surrogate of :func:`gspo_loss`, or of :func:`gspo_token_loss` with ``per_token``, for advantages that differ within a sequence."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    per_token: bool = False
    old: OldLogprobs = "old_logprobs"

    def __post_init__(self) -> None:
        check_old("GSPO", self.old)
        check_clip("GSPO", self.clip_low, self.clip_high)

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        fn = gspo_token_loss if self.per_token else gspo_loss
        inputs = policy_inputs(logprobs, batch, self.old)
        return fn(*inputs, batch.cu_seqlens, clip_low=self.clip_low, clip_high=self.clip_high)
