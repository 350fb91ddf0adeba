"""GSPO: one ratio for each sequence. The rules of :mod:`~areal.trainer.losses.policy` hold: per token, 0 outside the mask."""

from __future__ import annotations

from torch import Tensor

from areal.trainer.losses.numerics import at_trained, log_ratio, spread, trained_positions
from areal.trainer.losses.policy import PolicyLoss, clipped_loss
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
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``, where ``s = exp(mean_t (log p - log p_old))`` over a sequence's trained tokens.

    GSPO (Zheng et al., 2025), equations 5 and 7. ``A`` is the mean of a sequence's advantages over its trained tokens: they should all be the
    same. Each trained token has the loss of its sequence, so that :class:`~areal.trainer.losses.aggregate.SequenceMean` gives the paper's
    objective, and ``SequenceMeanOfSums`` that of LUSPO (2026), which weighs by length.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``. cu_seqlens: int32 ``[n + 1]``.
        clip_low, clip_high: at least 0; ``inf`` for no bound. They are small because a mean over tokens hardly moves.
    """
    keep = trained_positions(mask)
    log_s = segment_mean(log_ratio(logprobs, old_logprobs, mask), cu_seqlens, weights=keep)
    advantage = segment_mean(at_trained(advantages.detach(), mask), cu_seqlens, weights=keep)
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
    """GSPO with an advantage for each token: the clip of ``s_t = sg(s) p_t / sg(p_t)``, whose value is ``s`` and whose gradient is the token's.

    ``sg`` stops the gradient. GSPO-token (Zheng et al., 2025), equations 13 and 14. With equal advantages in a sequence, and
    :class:`~areal.trainer.losses.aggregate.SequenceMean`, it has the value and gradient of :func:`gspo_loss`.

    Args:
        logprobs, old_logprobs, advantages, mask: ``[T]``. cu_seqlens: int32 ``[n + 1]``.
        clip_low, clip_high: at least 0; ``inf`` for no bound.
    """
    keep = trained_positions(mask)
    log_s = segment_mean(log_ratio(logprobs.detach(), old_logprobs, mask), cu_seqlens, weights=keep)
    of_token = at_trained(logprobs, mask) - at_trained(logprobs.detach(), mask)
    log_s_token = at_trained(spread(log_s, cu_seqlens, len(mask)), mask) + of_token
    return clipped_loss(log_s_token, at_trained(advantages.detach(), mask), clip_low=clip_low, clip_high=clip_high)
