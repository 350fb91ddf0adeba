"""Generalised Advantage Estimation, for algorithms with a critic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from areal.trainer.advantages.scan import check_discount, check_rewards, discounted_sums, find_actions


class GAE(NamedTuple):
    """Advantages, and returns (the critic's targets): of the shape of the values, 0 at positions without an action."""

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
    """Return Generalised Advantage Estimates (Schulman et al. 2016, arXiv:1506.02438, section 3).

    Over the actions ``k`` of a sequence,

        delta_k = r_k + gamma * V_{k+1} - V_k
        A_k     = delta_k + gamma * lam * A_{k+1} = sum_i (gamma * lam)^i delta_{k+i}
        R_k     = A_k + V_k                                (TD(lambda) return)

    A step goes from one action to the next. Positions in between, such as a tool's output, are skipped: ``V_{k+1}`` is the value at
    the next *action*, and the gap is not discounted. Values at skipped positions may be NaN. ``V`` after the last action is
    ``bootstrap``.

    Tensors are position-aligned: ``values[t]`` is the critic's value before the action at ``t`` (the token ``t + 1``), and
    ``rewards[t]`` is the reward of that token. Computed in float64; see
    :func:`~areal.trainer.advantages.scan.discounted_sums` for the accuracy.

    Args:
        rewards: ``[T]`` packed, or ``[B, S]`` padded; 0 at positions without an action.
        values: of the shape of ``rewards``.
        action_mask: of the shape of ``rewards``. Not 0 at actions, such as a loss mask.
        cu_seqlens: integers ``[n + 1]`` for packed data; ``None`` for padded.
        gamma: discount per step, from 0 to 1.
        lam: from 0 (one step, least variance) to 1 (Monte Carlo, least bias).
        bootstrap: ``[n]`` (``[B]``). Value after the last action of each sequence: 0 (the default) if the episode ended, the critic's
            value at the last position if it was truncated.

    Returns:
        Tensors without a gradient, of the dtype of ``values`` but at least float32.

    Raises:
        ValueError: shapes do not agree, a discount is out of range, or a position without an action has a reward.
    """
    check_discount("gamma", gamma)
    check_discount("lam", lam)
    if values.shape != rewards.shape:
        raise ValueError(f"values are {list(values.shape)} and rewards {list(rewards.shape)}: give both one shape")
    # A reward outside the actions would be lost without an error.
    check_rewards(rewards, action_mask)
    actions = find_actions(action_mask, cu_seqlens)
    if bootstrap is not None and bootstrap.shape != (actions.n_sequences,):
        raise ValueError(
            f"bootstrap is {list(bootstrap.shape)} for {actions.n_sequences} sequences: give one value for each, 0 where "
            "the episode ended"
        )
    # V_{k+1}: the value at the next action, or the bootstrap value after the last one.
    value = actions.take(values)
    after = torch.zeros_like(value) if bootstrap is None else bootstrap.double()[actions.sequences]
    following = torch.where(actions.is_last(), after, value.roll(-1))
    # delta_k, and its discounted sum over the rest of the sequence.
    delta = actions.take(rewards) + gamma * following - value
    advantage = discounted_sums(delta, actions.sequences, gamma * lam)
    return GAE(actions.put(advantage, values), actions.put(advantage + value, values))
