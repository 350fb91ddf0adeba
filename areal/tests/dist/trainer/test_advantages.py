"""Advantages over data-parallel ranks: what one process has of the concatenation, and the same bits on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.tests.harness.tiny import started
from areal.tests.harness.world import world
from areal.trainer.advantages import (
    Groups,
    dr_grpo,
    grpo,
    normalize,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from areal.utils import platform

N_GROUPS = 9
IDLE = pytest.mark.parametrize("idle", [False, True])


def sum_over_ranks(x: Tensor) -> Tensor:
    total = x.to(platform.current_device(), copy=True)
    dist.all_reduce(total)
    return total.to(x.device)


def same_everywhere(x: Any) -> None:
    """The same bits, or values, on every rank."""
    everyones: list[Any] = [None] * world().size
    dist.all_gather_object(everyones, x.view(torch.int64).tolist() if isinstance(x, Tensor) else x)
    assert all(theirs == everyones[0] for theirs in everyones)


class Everything:
    """The global batch: sequences of groups that lie anywhere.

    With ``idle``, the last of several ranks is without sequences.
    """

    def __init__(self, idle: bool) -> None:
        n, self.shares = 23, max(1, world().size - idle)
        generator = torch.Generator().manual_seed(7)
        self.keys = torch.randint(0, N_GROUPS - 2, (n,), generator=generator)
        self.keys[[0, 6, 13, 15]] = 0
        self.keys[5] = N_GROUPS - 2  # a group of one; the last group is empty
        self.rewards = torch.randint(0, 3, (n,), generator=generator) / 3 + 1000.0
        self.rewards[self.keys == 0] = 0.1
        self.lengths = torch.randint(1, 9, (n,), generator=generator)
        self.bounds = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        tokens = int(self.bounds[-1])
        self.mask = (torch.rand(tokens, generator=generator) < 0.7).float()
        self.values = (torch.randn(tokens, generator=generator, dtype=torch.float64) + 1e6) * (self.mask != 0)

    def mine(self) -> tuple[Tensor, Tensor]:
        """This rank's sequences and tokens, int64."""
        owner = torch.arange(len(self.keys)).remainder(self.shares)
        sequences = (owner == world().rank).nonzero().squeeze(1)
        return sequences, (owner.repeat_interleave(self.lengths) == world().rank).nonzero().squeeze(1)

    def my_bounds(self, sequences: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths[sequences].cumsum(0)])

    def groups(self, sequences: Tensor) -> Groups:
        return Groups.over_ranks(self.keys[sequences], N_GROUPS, sum_over_ranks)


def close(actual: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(
        actual.double(), want.double(), rtol=1e-12 if want.dtype == torch.float64 else 2e-7, atol=1e-12
    )


@pytest.mark.world(1, 2, 4)
@IDLE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_advantages_equal_global_batch(dtype: torch.dtype, idle: bool) -> None:
    batch = Everything(idle)
    sequences, _ = batch.mine()
    rewards = batch.rewards.to(dtype)
    full, mine = Groups.local(batch.keys), batch.groups(sequences)
    for estimator in (grpo, dr_grpo, rloo):
        want = estimator(rewards, full)
        assert want.any()
        close(estimator(rewards[sequences], mine), want[sequences])
        assert not want[batch.keys == 0].any()
    moments = mine.moments(rewards[sequences])
    assert moments.count.tolist() == torch.bincount(batch.keys, minlength=N_GROUPS).tolist()
    for table in (moments.count, moments.mean, moments.squares, moments.std()):
        same_everywhere(table)


@pytest.mark.world(1, 2, 4)
@IDLE
def test_episodes_of_several_sequences_equal_global_batch(idle: bool) -> None:
    """Every episode is on one rank, and its group on several."""
    batch = Everything(idle)
    episodes = torch.arange(len(batch.keys)).repeat_interleave(1 + torch.arange(len(batch.keys)) % 3)
    keys, rewards = batch.keys[episodes], batch.rewards[episodes].double() + 0.1 * torch.arange(len(episodes))
    mine = episodes.remainder(batch.shares) == world().rank
    groups = Groups.over_ranks(keys[mine], N_GROUPS, sum_over_ranks, episodes[mine])
    for estimator in (grpo, dr_grpo, rloo):
        close(estimator(rewards[mine], groups), estimator(rewards, Groups.local(keys, episodes))[mine])
    moments = groups.moments(rewards[mine])
    assert moments.count.tolist() == torch.bincount(batch.keys, minlength=N_GROUPS).tolist()
    same_everywhere(moments.mean)


@pytest.mark.world(1, 2, 4)
@IDLE
@pytest.mark.parametrize("scale", [True, False])
def test_normalization_equals_global_batch(scale: bool, idle: bool) -> None:
    batch = Everything(idle)
    sequences, tokens = batch.mine()
    x, mask = batch.values[tokens], batch.mask[tokens]
    assert bool(len(x)) == (world().rank < batch.shares)
    actual = normalize(x, mask, scale=scale, sum_over_ranks=sum_over_ranks)
    close(actual, normalize(batch.values, batch.mask, scale=scale)[tokens])
    mine = batch.groups(sequences).of_tokens(batch.my_bounds(sequences))
    by_group = normalize(x, mask, scale=scale, groups=mine)
    full = Groups.local(batch.keys).of_tokens(batch.bounds)
    close(by_group, normalize(batch.values, batch.mask, scale=scale, groups=full)[tokens])
    moments = Groups.whole_batch(x, sum_over_ranks).moments(x, mask)
    for table in (moments.count, moments.mean, moments.squares):
        same_everywhere(table)


@pytest.mark.world(1, 2, 4)
@IDLE
def test_reinforce_plus_plus_equals_global_batch(idle: bool) -> None:
    batch = Everything(idle)
    sequences, tokens = batch.mine()
    mask, bounds = batch.mask[tokens], batch.my_bounds(sequences)
    want = reinforce_plus_plus(batch.values, batch.mask, batch.bounds, gamma=0.9)
    actual = reinforce_plus_plus(batch.values[tokens], mask, bounds, gamma=0.9, sum_over_ranks=sum_over_ranks)
    close(actual, want[tokens])
    rewards = batch.rewards.double()
    want = reinforce_plus_plus_baseline(rewards, Groups.local(batch.keys), batch.mask, batch.bounds)
    actual = reinforce_plus_plus_baseline(
        rewards[sequences], batch.groups(sequences), mask, bounds, sum_over_ranks=sum_over_ranks
    )
    close(actual, want[tokens])


@pytest.mark.world(2)
def test_non_finite_reward_raises_on_every_rank() -> None:
    rewards = torch.tensor([1.0, float("nan") if world().rank == 0 else 2.0])
    groups = Groups.over_ranks(torch.tensor([world().rank, 2]), 3, sum_over_ranks)
    with pytest.raises(ValueError, match="group 2 has numbers that are not finite"):
        grpo(rewards, groups)
    with pytest.raises(ValueError, match="not finite"):
        normalize(rewards, sum_over_ranks=sum_over_ranks)


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:c2"])
def test_engine_global_sum_counts_each_sequence_once(backend: str) -> None:
    """Ranks of one data-parallel coordinate have the same sequences, which count once."""
    rewards, keys = torch.tensor([0.0, 1.0, 1.0, 0.5]), torch.tensor([0, 1, 0, 1])
    want = grpo(rewards, Groups.local(keys))
    with started(backend, optimizer=None) as engine:
        mine = slice(engine.dp_rank, None, engine.dp_size)
        actual = grpo(rewards[mine], Groups.over_ranks(keys[mine], 2, engine.global_sum))
        close(actual, want[mine])
        close(normalize(rewards[mine], sum_over_ranks=engine.global_sum), normalize(rewards)[mine])
