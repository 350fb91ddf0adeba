"""Advantage estimators: from the rewards of sequences to the advantages of tokens, on list batches as an engine takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areal.trainer.advantages import (
    Groups,
    SumOverRanks,
    at_last_action,
    gae,
    grpo,
    join,
    kl_penalized,
    normalize,
    split,
    to_samples,
)

Sample = dict[str, Tensor]
"""One sequence: per-token tensors ``[S_i]``, and scalar tensors for per-sequence values."""


class Estimator(Protocol):
    """Adds ``advantages``, and with a critic ``returns``, to samples. Collective over data-parallel ranks."""

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        """Return copies of the samples with the new keys.

        Args:
            samples: of this data-parallel rank; may be empty.
            sum_over_ranks: ``engine.global_sum``.
        """
        ...


def group_samples(samples: list[Sample]) -> Groups:
    """Return the groups of samples by ``group_ids``; with ``episode_ids``, the sequences of an episode are one member of their group.

    Raises:
        ValueError: some samples have ``episode_ids`` and others do not.
    """
    # A group is never split over data-parallel ranks, so no sum over ranks is needed.
    group_ids = torch.stack([sample["group_ids"] for sample in samples])
    episodes = [sample["episode_ids"] for sample in samples if "episode_ids" in sample]
    if episodes and len(episodes) < len(samples):
        raise ValueError(
            f"{len(episodes)} of {len(samples)} samples have the key 'episode_ids': give it to all, or to none"
        )
    return Groups.local(group_ids, torch.stack(episodes) if episodes else None)


@dataclass(frozen=True)
class GroupRelative:
    """Assign the group-relative advantage of a sequence to all its actions. Episodes are the members of a group.

    Attributes:
        advantage: function of rewards and groups: :func:`~areal.trainer.advantages.grpo`, ``dr_grpo`` or ``rloo``.
        shape: reward shaping, applied first: maps rewards ``[n]`` and samples to rewards ``[n]``.
    """

    advantage: Callable[[Tensor, Groups], Tensor] = grpo
    shape: Callable[[Tensor, list[Sample]], Tensor] | None = None

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        if not samples:
            return []
        # One reward per sequence, shaped before it is compared.
        rewards = torch.stack([sample["rewards"] for sample in samples])
        if self.shape is not None:
            rewards = self.shape(rewards, samples)
        groups = group_samples(samples)
        advantages = to_samples(self.advantage(rewards, groups), [sample["loss_mask"] for sample in samples])
        return [sample | {"advantages": each} for sample, each in zip(samples, advantages, strict=True)]


@dataclass(frozen=True)
class CriticBased:
    """Generalised Advantage Estimation from a critic's ``old_values``. The reward of a sequence is that of its last action.

    Attributes:
        gamma, lam: see :func:`~areal.trainer.advantages.gae`.
        kl_coef: subtracts ``kl_coef * (old_logprobs - ref_logprobs)`` from the reward of each token. Needs a reference.
        bootstrap_truncated: use the critic's value at the last position as the value after a truncated sequence, as if it continued. For
            intermediate rewards. An outcome reward has judged the truncated answer, so that nothing follows it.
        whiten: normalise the advantages of the global batch to mean 0 and standard deviation 1.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.0
    bootstrap_truncated: bool = False
    whiten: bool = True

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        estimate = self._estimate(samples) if samples else None
        advantages = torch.zeros(0) if estimate is None else estimate[0]
        # A collective: a rank without samples takes part with an empty tensor.
        if self.whiten:
            mask = None if estimate is None else estimate[2]
            advantages = normalize(advantages, mask, sum_over_ranks=sum_over_ranks)
        if estimate is None:
            return []
        _, returns, _, cu_seqlens = estimate
        return [
            sample | {"advantages": a, "returns": r}
            for sample, a, r in zip(samples, split(advantages, cu_seqlens), split(returns, cu_seqlens), strict=True)
        ]

    def _estimate(self, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return advantages, returns and mask ``[T]`` of the packed samples, and ``cu_seqlens`` ``[n + 1]``."""
        mask, cu_seqlens = join([sample["loss_mask"] for sample in samples])
        values, _ = join([sample["old_values"] for sample in samples])
        # The outcome's reward at the last action, minus a KL penalty at each.
        rewards = at_last_action(torch.stack([sample["rewards"] for sample in samples]), mask, cu_seqlens)
        if self.kl_coef:
            kl, _ = join([sample["old_logprobs"] - sample["ref_logprobs"] for sample in samples])
            rewards = kl_penalized(rewards, kl, mask, coef=self.kl_coef)
        # The value after the last action: 0 where the sequence ended.
        bootstrap = None
        if self.bootstrap_truncated:
            truncated = torch.stack([sample["truncated"] for sample in samples])
            bootstrap = torch.where(truncated, values[cu_seqlens[1:] - 1], 0.0)
        estimate = gae(rewards, values, mask, cu_seqlens, gamma=self.gamma, lam=self.lam, bootstrap=bootstrap)
        return estimate.advantages, estimate.returns, mask, cu_seqlens
