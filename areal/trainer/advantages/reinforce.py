"""REINFORCE++: returns per token, normalised over the global batch instead of within groups."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.trainer.advantages.group_relative import dr_grpo
from areal.trainer.advantages.groups import Groups, SumOverRanks
from areal.trainer.advantages.normalize import normalize
from areal.trainer.advantages.scan import check_discount, check_rewards, discounted_sums, find_actions
from areal.trainer.advantages.tokens import to_tokens


@torch.no_grad()
def discounted_returns(
    rewards: Tensor, action_mask: Tensor, cu_seqlens: Tensor | None = None, *, gamma: float = 1.0
) -> Tensor:
    """Return ``G_k = r_k + gamma * G_{k+1}`` over the actions of each sequence (Sutton and Barto 2018, section 3.3).

    A step goes from one action to the next. Positions in between are skipped.

    Args:
        rewards: ``[T]`` packed, or ``[B, S]`` padded; 0 at positions without an action.
        action_mask: of the shape of ``rewards``, not 0 at actions.
        cu_seqlens: integers ``[n + 1]`` for packed data; ``None`` for padded.
        gamma: from 0 to 1.

    Returns:
        Of the shape of ``rewards`` and its dtype, but at least float32; 0 at positions without an action.

    Raises:
        ValueError: shapes do not match, ``gamma`` is out of range, or a position without an action has a reward.
    """
    check_discount("gamma", gamma)
    check_rewards(rewards, action_mask)
    # Over actions only: positions in between do not discount.
    actions = find_actions(action_mask, cu_seqlens)
    return actions.put(discounted_sums(actions.take(rewards), actions.sequences, gamma), rewards)


def reinforce_plus_plus(
    rewards: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): returns of tokens, normalised over all tokens of the global batch.

    With the outcome's reward at the last action and the KL penalty in the reward of each token
    (:func:`~areal.trainer.advantages.shaping.kl_penalized`, ``k1``), and ``gamma = 1``, the return at ``t`` is the paper's
    ``r - beta * sum_{i >= t} KL(i)``. Meant for one response per prompt.

    Args:
        rewards, action_mask, cu_seqlens, gamma: as :func:`discounted_returns`.
        ddof, eps, sum_over_ranks: as :func:`~areal.trainer.advantages.normalize.normalize`. Collective.

    Returns:
        Advantages per token; shape and dtype as for :func:`discounted_returns`.

    Raises:
        ValueError: see both functions.
    """
    # The batch statistics replace a baseline per group.
    returns = discounted_returns(rewards, action_mask, cu_seqlens, gamma=gamma)
    return normalize(returns, action_mask, ddof=ddof, eps=eps, sum_over_ranks=sum_over_ranks)


def reinforce_plus_plus_baseline(
    rewards: Tensor,
    groups: Groups,
    action_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262): ``r_i`` minus the mean of its group, assigned to each token
    and normalised over all tokens of the global batch.

    A KL term belongs in the loss here, not in the reward. A group of one has deviation 0 before the normalisation.

    Args:
        rewards: ``[n]``. One per sequence.
        groups: partition of the sequences. Groups may span ranks.
        action_mask: ``[T]`` packed or ``[n, S]`` padded.
        cu_seqlens: integers ``[n + 1]`` for packed data; ``None`` for padded.
        ddof, eps, sum_over_ranks: of the normalisation over the batch. Collective.

    Returns:
        Advantages per token, of the shape of ``action_mask``; 0 at positions without an action.

    Raises:
        ValueError: as :func:`~areal.trainer.advantages.group_relative.dr_grpo` and
            :func:`~areal.trainer.advantages.normalize.normalize`.
    """
    # Per sequence first, then per token, so that long sequences weigh more in the normalisation.
    tokens = to_tokens(dr_grpo(rewards, groups), action_mask, cu_seqlens)
    return normalize(tokens, action_mask, ddof=ddof, eps=eps, sum_over_ranks=sum_over_ranks)
