"""Rewards before they become advantages: length, distance from a reference, range."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.trainer.advantages.groups import result_dtype


def overlong_penalty(lengths: Tensor, *, max_length: int, cache_length: int, factor: float = 1.0) -> Tensor:
    """What to add to the reward of a response that comes near the limit, or passes it
    (soft overlong punishment; DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.4).

    ``factor`` times 0 up to ``max_length - cache_length`` tokens, ``-1`` from ``max_length`` on, and the straight line
    ``(max_length - cache_length - length) / cache_length`` between.

    Args:
        lengths: ``[n]``, response tokens of each sequence, such as ``segment_sum(loss_mask != 0, cu_seqlens)``.
        max_length: tokens where the full penalty is reached.
        cache_length: tokens before that where it begins.
        factor: size of the full penalty.

    Returns:
        float32 (float64 for such lengths) ``[n]``, from ``-factor`` to 0.

    Raises:
        ValueError: ``cache_length`` is not from 1 to ``max_length``, or ``factor`` is negative.
    """
    if not 1 <= cache_length <= max_length:
        raise ValueError(f"cache_length = {cache_length} with max_length = {max_length}: it is from 1 to max_length")
    if factor < 0:
        raise ValueError(f"factor = {factor}: it is 0 or more; the result is what to add, 0 or less")
    over = (max_length - cache_length - lengths.to(result_dtype(lengths))) / cache_length
    return factor * over.clamp(-1.0, 0.0)


def kl_penalized(rewards: Tensor, kl: Tensor, action_mask: Tensor, *, coef: float) -> Tensor:
    """``r_t - coef * kl_t``: the KL penalty as a part of the reward, token by token
    (Ziegler et al. 2019, arXiv:1909.08593; Ouyang et al. 2022, arXiv:2203.02155).

    Args:
        rewards: ``[T]`` or ``[B, S]``; an outcome's reward is at the last action
            (:func:`~areal.trainer.advantages.tokens.at_last_action`).
        kl: of the same shape, an estimate of the KL divergence at each token. ``logprobs - ref_logprobs`` (``k1``) is that of
            the papers, and the one whose sum over a sampled sequence is unbiased as a reward.
        action_mask: of the same shape. Where it is 0, ``kl`` is left out, whatever it is.
        coef: 0 or more.

    Returns:
        Constants of the shape of ``rewards``, no narrower than float32.

    Raises:
        ValueError: shapes do not agree, or ``coef`` is negative.
    """
    if not rewards.shape == kl.shape == action_mask.shape:
        raise ValueError(
            f"rewards are {list(rewards.shape)}, kl {list(kl.shape)}, action_mask {list(action_mask.shape)}: give all one shape"
        )
    if coef < 0:
        raise ValueError(f"coef = {coef}: a penalty is 0 or more; it is subtracted already")
    dtype = torch.promote_types(result_dtype(rewards), kl.dtype)
    return rewards.detach().to(dtype) - coef * kl.detach().to(dtype).masked_fill(action_mask == 0, 0)
