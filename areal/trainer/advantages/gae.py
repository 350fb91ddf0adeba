"""Generalised Advantage Estimation, for algorithms with a critic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from areal.trainer.advantages.scan import check_discount, check_rewards, discounted_sums, find_actions


class GAE(NamedTuple):
    """Advantages, and returns for the critic to learn: of the shape of the values, 0 where there is no action."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> GAE:
    """Generalised Advantage Estimation (Schulman et al. 2016, arXiv:1506.02438, section 3).

    Over the actions ``k`` of a sequence,

        delta_k = r_k + gamma * V_{k+1} - V_k
        A_k     = delta_k + gamma * lam * A_{k+1} = sum_i (gamma * lam)^i delta_{k+i}
        R_k     = A_k + V_k                                (TD(lambda) return)

    A step goes from one action to the next. Positions between them that are no actions, such as a tool's output, are as
    if they were not there: ``V_{k+1}`` is the value at the next *action*, and time is not discounted across the gap.
    What their values are, NaN included, does not matter. After the last action stands ``bootstrap``.

    Everything is position-aligned: ``values[t]`` is the critic's before the action at ``t``, that is before the token at
    ``t + 1``; ``rewards[t]`` is what that token earned. Computed in float64; see
    :func:`~areal.trainer.advantages.scan.discounted_sums` for the accuracy.

    Args:
        rewards: ``[T]`` packed, or ``[B, S]`` padded; 0 where there is no action.
        values: of the same shape.
        action_mask: of the same shape, not 0 at actions, such as the loss mask; its size does not matter.
        cu_seqlens: integers ``[n + 1]`` for packed data; ``None`` for padded.
        gamma: discount of a step, from 0 to 1.
        lam: from 0 (one step, least variance) to 1 (Monte Carlo, least bias).
        bootstrap: ``[n]`` (``[B]``), the value after the last action of each sequence: 0, the default, where the episode
            ended; the critic's at the last position of the sequence where it was cut off.

    Returns:
        Constants of the dtype of ``values``, but no narrower than float32.

    Raises:
        ValueError: shapes do not agree, a discount is out of range, or a reward stands where there is no action.
    """
    check_discount("gamma", gamma)
    check_discount("lam", lam)
    if values.shape != rewards.shape:
        raise ValueError(f"values are {list(values.shape)} and rewards {list(rewards.shape)}: give both one shape")
    check_rewards(rewards, action_mask)
    actions = find_actions(action_mask, cu_seqlens)
    if bootstrap is not None and bootstrap.shape != (actions.n_sequences,):
        raise ValueError(
            f"bootstrap is {list(bootstrap.shape)} for {actions.n_sequences} sequences: give one value for each, 0 where "
            "the episode ended"
        )
    value = actions.take(values)
    after = torch.zeros_like(value) if bootstrap is None else bootstrap.double()[actions.sequences]
    following = torch.where(actions.is_last(), after, value.roll(-1))
    delta = actions.take(rewards) + gamma * following - value
    advantage = discounted_sums(delta, actions.sequences, gamma * lam)
    return GAE(actions.put(advantage, values), actions.put(advantage + value, values))
