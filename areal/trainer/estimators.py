"""Advantage estimators: from the rewards of sequences to the advantages of tokens, on list batches as an engine takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from areal.trainer.advantages import (
    Groups,
    SumOverRanks,
    at_last_action,
    dr_grpo,
    gae,
    grpo,
    join,
    kl_penalized,
    normalize,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    split,
    to_samples,
)

Sample = dict[str, Tensor]
"""One sequence: per-token tensors ``[S_i]``, and scalar tensors for per-sequence values."""


class Estimator(Protocol):
    """Adds ``advantages``, and with a critic ``returns``, to samples. Collective over data-parallel ranks.

    An estimator with a true attribute ``compares_groups`` also gets the samples that are not trained on (too long, or masked because they
    were truncated), for the baseline of their group. They have the key ``untrained`` and none that an engine computes.
    """

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        """Return copies of the samples with the new keys, without those that have the key ``untrained``.

        Args:
            samples: of this data-parallel rank; may be empty.
            sum_over_ranks: ``engine.global_sum``.
        """
        ...


Shape = Callable[[Tensor, list[Sample]], Tensor]
"""Maps the rewards ``[n]`` of samples to other rewards ``[n]``."""


def check_estimator(estimator: object) -> None:
    """Raise if an advantage function is passed in place of an estimator.

    Raises:
        ValueError: names the function, and the estimators.
    """
    if estimator in _ADVANTAGE_FUNCTIONS:
        raise ValueError(
            f"estimator = {getattr(estimator, '__name__', estimator)}: an advantage function takes tensors, and an estimator samples: pass "
            "GroupRelative(function), ReinforcePlusPlus(), ReinforcePlusPlusBaseline(), CriticBased() or OnPolicyDistillation()"
        )


_ADVANTAGE_FUNCTIONS = (grpo, dr_grpo, rloo, gae, reinforce_plus_plus, reinforce_plus_plus_baseline, normalize)


def group_tokens(samples: list[Sample]) -> list[Tensor]:
    """Return for each sample the sum of ``loss_mask`` over its group, which :class:`~areal.trainer.losses.GroupTokenMean` reads.

    Args:
        samples: trained samples of complete groups.
    """
    totals: dict[int, float] = {}
    for sample in samples:
        group = int(sample["group_ids"])
        totals[group] = totals.get(group, 0.0) + float(sample["loss_mask"].sum())
    return [torch.tensor(totals[int(sample["group_ids"])]) for sample in samples]


def _shaped_rewards(samples: list[Sample], shape: Shape | None) -> Tensor:
    """Return one reward per sequence, ``[n]``."""
    rewards = torch.stack([sample["rewards"] for sample in samples])
    return rewards if shape is None else shape(rewards, samples)


def _token_rewards(rewards: Tensor, samples: list[Sample], mask: Tensor, cu_seqlens: Tensor, kl_coef: float) -> Tensor:
    """Return rewards of tokens ``[T]``: that of the sequence at its last action, minus a KL penalty at each."""
    tokens = at_last_action(rewards, mask, cu_seqlens)
    if not kl_coef:
        return tokens
    kl, _ = join([sample["old_logprobs"] - sample["ref_logprobs"] for sample in samples])
    return kl_penalized(tokens, kl, mask, coef=kl_coef)


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
    shape: Shape | None = None
    compares_groups: ClassVar[bool] = True

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        if not samples:
            return []
        # One reward per sequence, shaped before it is compared.
        rewards = _shaped_rewards(samples, self.shape)
        advantages = self.advantage(rewards, group_samples(samples))
        # Untrained samples have done their part in the baseline.
        each = to_samples(advantages, [sample["loss_mask"] for sample in samples])
        return [
            sample | {"advantages": a} for sample, a in zip(samples, each, strict=True) if "untrained" not in sample
        ]


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """REINFORCE++: returns of tokens, normalised over all tokens of the global batch. The reward of a sequence is that of its last action.

    See :func:`~areal.trainer.advantages.reinforce_plus_plus`. Meant for one answer per prompt.

    Attributes:
        gamma: discount per action.
        kl_coef: subtracts ``kl_coef * (old_logprobs - ref_logprobs)`` from the reward of each token. Needs a reference.
        shape: reward shaping, as in :class:`GroupRelative`.
    """

    gamma: float = 1.0
    kl_coef: float = 0.0
    shape: Shape | None = None

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        # The normalisation is collective: a rank without samples takes part with an empty tensor.
        if not samples:
            normalize(torch.zeros(0), sum_over_ranks=sum_over_ranks)
            return []
        mask, cu_seqlens = join([sample["loss_mask"] for sample in samples])
        rewards = _token_rewards(_shaped_rewards(samples, self.shape), samples, mask, cu_seqlens, self.kl_coef)
        advantages = reinforce_plus_plus(rewards, mask, cu_seqlens, gamma=self.gamma, sum_over_ranks=sum_over_ranks)
        return [sample | {"advantages": a} for sample, a in zip(samples, split(advantages, cu_seqlens), strict=True)]


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline:
    """REINFORCE++ with baseline: the reward less its group's mean, at each token, normalised over all trained tokens of the global batch.

    See :func:`~areal.trainer.advantages.reinforce_plus_plus_baseline`. A KL penalty belongs in the objective.

    Attributes:
        shape: reward shaping, as in :class:`GroupRelative`.
    """

    shape: Shape | None = None
    compares_groups: ClassVar[bool] = True

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        centered = GroupRelative(dr_grpo, self.shape)(samples, sum_over_ranks)
        if not centered:
            normalize(torch.zeros(0), sum_over_ranks=sum_over_ranks)
            return []
        # Over trained tokens only: untrained samples are left out already.
        mask, cu_seqlens = join([sample["loss_mask"] for sample in centered])
        tokens, _ = join([sample["advantages"] for sample in centered])
        advantages = split(normalize(tokens, mask, sum_over_ranks=sum_over_ranks), cu_seqlens)
        return [sample | {"advantages": a} for sample, a in zip(centered, advantages, strict=True)]


@dataclass(frozen=True)
class OnPolicyDistillation:
    """Distillation from a teacher on the student's own answers: ``ref_logprobs - old_logprobs`` at each token. The reference is the teacher.

    The expectation of its negative is the reverse KL divergence, per token and without discount (Agarwal et al., "On-Policy Distillation of
    Language Models", 2023; Lu and Thinking Machines Lab, "On-Policy Distillation", 2025). Rewards are not read.
    """

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        return [
            sample | {"advantages": (sample["ref_logprobs"] - sample["old_logprobs"]) * (sample["loss_mask"] != 0)}
            for sample in samples
        ]


@dataclass(frozen=True)
class CriticBased:
    """Generalised Advantage Estimation from a critic's ``old_values``. The reward of a sequence is that of its last action.

    Attributes:
        gamma, lam: see :func:`~areal.trainer.advantages.gae`.
        kl_coef: subtracts ``kl_coef * (old_logprobs - ref_logprobs)`` from the reward of each token. Needs a reference.
        bootstrap_truncated: use the critic's value at the last position as the value after a truncated sequence, as if it continued. For
            intermediate rewards. An outcome reward has judged the truncated answer, so that nothing follows it.
        whiten: normalise the advantages of the global batch to mean 0 and standard deviation 1.
        shape: reward shaping, as in :class:`GroupRelative`.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.0
    bootstrap_truncated: bool = False
    whiten: bool = True
    shape: Shape | None = None

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
        rewards = _token_rewards(_shaped_rewards(samples, self.shape), samples, mask, cu_seqlens, self.kl_coef)
        # The value after the last action: 0 where the sequence ended.
        bootstrap = None
        if self.bootstrap_truncated:
            truncated = torch.stack([sample["truncated"] for sample in samples])
            bootstrap = torch.where(truncated, values[cu_seqlens[1:] - 1], 0.0)
        estimate = gae(rewards, values, mask, cu_seqlens, gamma=self.gamma, lam=self.lam, bootstrap=bootstrap)
        return estimate.advantages, estimate.returns, mask, cu_seqlens
