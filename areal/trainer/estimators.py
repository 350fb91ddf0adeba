"""From the rewards of a batch's sequences to the advantages of its tokens, on list batches as an engine takes them."""

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
"""One sequence: per-token tensors ``[S_i]``, and scalars about the whole."""


class Estimator(Protocol):
    """Adds ``advantages``, and with a critic ``returns``, to the samples of this data-parallel rank. Collective over these ranks."""

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]: ...


@dataclass(frozen=True)
class GroupRelative:
    """Every action of a sequence gets the sequence's advantage over the others of its group.

    Attributes:
        advantage: :func:`~areal.trainer.advantages.grpo`, ``dr_grpo`` or ``rloo``.
        shape: changes the rewards ``[n]`` first, from them and the samples.
    """

    advantage: Callable[[Tensor, Groups], Tensor] = grpo
    shape: Callable[[Tensor, list[Sample]], Tensor] | None = None

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        if not samples:
            return []
        rewards = torch.stack([sample["rewards"] for sample in samples])
        if self.shape is not None:
            rewards = self.shape(rewards, samples)
        groups = Groups.local(torch.stack([sample["group_ids"] for sample in samples]))
        found = to_samples(self.advantage(rewards, groups), [sample["loss_mask"] for sample in samples])
        return [sample | {"advantages": each} for sample, each in zip(samples, found, strict=True)]


@dataclass(frozen=True)
class CriticBased:
    """Generalised Advantage Estimation from a critic's ``old_values``, the reward being that of the last action.

    Attributes:
        gamma, lam: see :func:`~areal.trainer.advantages.gae`.
        kl_coef: takes ``kl_coef * (old_logprobs - ref_logprobs)`` off the reward of each token; needs a reference.
        bootstrap_truncated: after the last action of a sequence that was cut off stands the critic's value at its last position, as if it went
            on; for rewards along the way. A reward for the outcome has judged the answer as it stands, and there nothing follows.
        whiten: bring the advantages of the global batch to mean 0 and deviation 1.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.0
    bootstrap_truncated: bool = False
    whiten: bool = True

    def __call__(self, samples: list[Sample], sum_over_ranks: SumOverRanks) -> list[Sample]:
        found = self._estimate(samples) if samples else None
        advantages = torch.zeros(0) if found is None else found[0]
        if self.whiten:
            mask = None if found is None else found[2]
            advantages = normalize(advantages, mask, sum_over_ranks=sum_over_ranks)
        if found is None:
            return []
        _, returns, _, cu_seqlens = found
        return [
            sample | {"advantages": a, "returns": r}
            for sample, a, r in zip(samples, split(advantages, cu_seqlens), split(returns, cu_seqlens), strict=True)
        ]

    def _estimate(self, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mask, cu_seqlens = join([sample["loss_mask"] for sample in samples])
        values, _ = join([sample["old_values"] for sample in samples])
        rewards = at_last_action(torch.stack([sample["rewards"] for sample in samples]), mask, cu_seqlens)
        if self.kl_coef:
            kl, _ = join([sample["old_logprobs"] - sample["ref_logprobs"] for sample in samples])
            rewards = kl_penalized(rewards, kl, mask, coef=self.kl_coef)
        bootstrap = None
        if self.bootstrap_truncated:
            truncated = torch.stack([sample["truncated"] for sample in samples])
            bootstrap = torch.where(truncated, values[cu_seqlens[1:] - 1], 0.0)
        found = gae(rewards, values, mask, cu_seqlens, gamma=self.gamma, lam=self.lam, bootstrap=bootstrap)
        return found.advantages, found.returns, mask, cu_seqlens
