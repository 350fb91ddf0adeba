"""Reward shaping, applied before advantages: a penalty for length, and a KL penalty per token."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.trainer.advantages.groups import result_dtype


def overlong_penalty(lengths: Tensor, *, max_length: int, cache_length: int, factor: float = 1.0) -> Tensor:
    """Return a penalty, to be added to the reward, for responses close to or above a maximum length.

    Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.4): ``factor`` times 0 up to ``max_length - cache_length``
    tokens, times -1 from ``max_length`` tokens on, and linear in between: ``(max_length - cache_length - length) / cache_length``.

    Args:
        lengths: ``[n]``. Response tokens of each sequence, such as ``segment_sum(loss_mask != 0, cu_seqlens)``.
        max_length: number of tokens from which the full penalty applies.
        cache_length: width of the linear range, in tokens.
        factor: size of the full penalty.

    Returns:
        float32 (float64 for float64 lengths) ``[n]``, from ``-factor`` to 0.

    Raises:
        ValueError: ``cache_length`` is not from 1 to ``max_length``, or ``factor`` is negative.
    """
    if not 1 <= cache_length <= max_length:
        raise ValueError(f"cache_length = {cache_length} with max_length = {max_length}: it is from 1 to max_length")
    if factor < 0:
        raise ValueError(f"factor = {factor}: it is 0 or more; the result is what to add, 0 or less")
    # Linear in the length, clamped to the full penalty and to none.
    over = (max_length - cache_length - lengths.to(result_dtype(lengths))) / cache_length
    return factor * over.clamp(-1.0, 0.0)


def kl_penalized(rewards: Tensor, kl: Tensor, action_mask: Tensor, *, coef: float) -> Tensor:
    """Return ``r_t - coef * kl_t``: the KL penalty as a component of each token's reward
    (Ziegler et al. 2019, arXiv:1909.08593; Ouyang et al. 2022, arXiv:2203.02155).

    Args:
        rewards: ``[T]`` or ``[B, S]``. An outcome reward belongs at the last action
            (:func:`~areal.trainer.advantages.tokens.at_last_action`).
        kl: of the shape of ``rewards``. Estimate of the KL divergence at each token. The papers use ``logprobs - ref_logprobs``
            (``k1``), whose sum over a sampled sequence is unbiased as a reward.
        action_mask: of the shape of ``rewards``. ``kl`` is excluded, and may be NaN, where it is 0.
        coef: 0 or more.

    Returns:
        Tensor without a gradient, of the shape of ``rewards``, at least float32.

    Raises:
        ValueError: shapes do not match, or ``coef`` is negative.
    """
    if not rewards.shape == kl.shape == action_mask.shape:
        raise ValueError(
            f"rewards are {list(rewards.shape)}, kl {list(kl.shape)}, action_mask {list(action_mask.shape)}: give all one shape"
        )
    if coef < 0:
        raise ValueError(f"coef = {coef}: a penalty is 0 or more; it is subtracted already")
    # Filled before the product: an excluded estimate may be NaN.
    dtype = torch.promote_types(result_dtype(rewards), kl.dtype)
    return rewards.detach().to(dtype) - coef * kl.detach().to(dtype).masked_fill(action_mask == 0, 0)
