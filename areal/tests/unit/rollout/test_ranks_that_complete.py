"""Batches of the groups that are complete on all ranks: a step begins when the ranks together have a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from areal.inference.protocol import Completion, Sampling
from areal.tests.harness.world import record
from areal.tests.unit.rollout.lockstep import Run, on_ranks, train_on_ranks
from areal.tests.unit.rollout.long_tail import TRAINING, Slow, oldest, plan
from areal.trainer.rollout.exchange import RolloutExchange
from areal.trainer.rollout.order import Share, counts_of_complete, equal_counts, position_of
from areal.trainer.rollout.plan import Group, Plan
from areal.trainer.rollout.runner import Runner


def indices(run: Run) -> list[int]:
    return [group.index for ranks in run.batches for groups in ranks for group in groups]


def check(run: Run, made: Plan, first: int = 0) -> None:
    """Every batch is complete and divided equally over the ranks, each group in it once and within the bound."""
    for step, ranks in enumerate(run.batches):
        groups = [group for its in ranks for group in its]
        assert sorted(group.position for group in groups) == list(range(made.groups))
        assert [sorted(group.position for group in its) for its in ranks] == [
            list(range(rank, made.groups, len(ranks))) for rank in range(len(ranks))
        ]
        assert made.partial_answers or min(map(oldest, groups)) >= first + step - made.max_staleness
    assert len(indices(run)) == len(set(indices(run)))


def done(states: Sequence[dict[str, Any]], groups: int) -> set[int]:
    """Return the indices of the groups that are not played again in a run that goes on from states."""
    shares = [Share(rank, len(states), groups) for rank in range(len(states))]
    return {
        share.index(number)
        for share, state in zip(shares, states, strict=True)
        for number in (*range(state["consumed"]), *state["ahead"])
    }


@pytest.mark.parametrize("partial", [False, True], ids=["cancelled", "partial"])
@pytest.mark.parametrize(("size", "steps"), [(4, 20), (16, 10)])
def test_trainer_hardly_waits_for_any_rank(size: int, steps: int, partial: bool) -> None:
    """As little as one rank that plays all groups."""
    made = plan(partial_answers=partial)
    run = train_on_ranks([Slow() for _ in range(size)], made, range(steps), TRAINING)
    check(run, made)
    cancelled = sum(group.cancelled for ranks in run.batches for groups in ranks for group in groups)
    share = f"{cancelled / (cancelled + steps * 16):.3f}"
    record("Trainer under a long tail", f"{size} ranks, {partial=}", waits=f"{max(run.idle):.3f}", cancelled=share)
    assert max(run.idle) <= 0.15
    assert (cancelled > 0) != partial


def test_slow_rank_gives_fewer_groups() -> None:
    """It plays as many at a time as the others, and no batch waits for it."""
    made, size = plan(groups=8, group_size=4), 4
    clients = [Slow(mean=4.0), *(Slow() for _ in range(size - 1))]
    run = train_on_ranks(clients, made, range(12), TRAINING)
    check(run, made)
    given = [sum(index % size == rank for index in indices(run)) for rank in range(size)]
    assert given[0] < 0.5 * min(given[1:])
    assert max(run.idle) <= 0.2
    for rank, state in enumerate(run.states):
        running = made.max_staleness * Share(rank, size, made.groups).per_batch
        assert len(state["waiting"]) <= running


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("partial", [False, True], ids=["cancelled", "partial"])
def test_run_goes_on_after_unequal_batches(partial: bool, after: int) -> None:
    """None is trained on twice, and without cancellation exactly those that were trained on are done."""
    made = plan(groups=12, group_size=2, partial_answers=partial)
    clients = [Slow(mean=1.0 + 2.0 * (rank == 1)) for rank in range(4)]
    first = train_on_ranks(clients, made, range(10), TRAINING / 4)
    check(first, made)
    assert len({state["consumed"] + len(state["ahead"]) for state in first.states}) > 1
    assert {(state["trained"], state["batches"]) for state in first.states} == {(10, 10)}
    assert any(state["waiting"] for state in first.states)
    again = [Slow() for _ in range(after)]
    rest = train_on_ranks(again, made, range(10, 22), TRAINING / 4, first.states)
    check(rest, made, first=10)
    used = indices(first) + indices(rest)
    assert len(used) == len(set(used)) == 22 * 12
    assert set(indices(first)) <= done(first.states, 12)
    assert set(used) <= done(rest.states, 12)
    if partial:
        waited = {group["index"] for state in first.states for group in state["waiting"]}
        assert done(first.states, 12) == set(indices(first))
        assert done(rest.states, 12) == set(used)
        assert waited <= set(used)


def test_without_staleness_batches_are_those_in_order() -> None:
    """On each rank, also with groups that are replaced."""

    def work(rank: int, runner: Runner, exchange: RolloutExchange) -> list[list[tuple[int, int]]]:
        played = []
        for step in range(4):
            runner.advance(step)
            played.append([(group.index, group.position) for group in exchange.next_groups()])
        return played

    played = []
    for in_order in (True, False):
        made = plan(groups=6, group_size=2, max_staleness=0, in_order=in_order)
        clients = [Slow(mean=1.0 + rank) for rank in range(3)]
        played.append(on_ranks(clients, made, work, keep=lambda group: group[0].group % 5 != 1))
    assert played[0] == played[1]


class Endless(Slow):
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(1e12)
        raise AssertionError


def test_errors_and_time_limits_are_raised_on_all_ranks() -> None:
    """Also while the other ranks wait for groups that never end."""
    made = plan(groups=4, group_size=1)

    def work(rank: int, runner: Runner, exchange: RolloutExchange) -> None:
        runner.advance(0)
        with pytest.raises(TimeoutError, match=r"no batch after 0.2 s: 0 of 4 groups are complete"):
            exchange.next_groups(timeout=0.2)
        if rank == 1:
            runner._fault = KeyError("no item")
        with pytest.raises(RuntimeError, match=r"rank 1: a group could not be played: 'no item'"):
            exchange.next_groups()

    on_ranks([Endless(), Endless(), Endless()], made, work)


def test_counts_follow_the_order_of_beginning() -> None:
    assert counts_of_complete([[(0, 0), (0, 4)], [(0, 1)]], 4) is None
    assert counts_of_complete([[(0, 0), (0, 4)], [(0, 1), (1, 3)]], 3) == [2, 1]
    # Ranks may be at different indices: the number of batches trained on counts before.
    assert counts_of_complete([[(3, 0), (3, 4)], [(1, 41), (2, 43)], []], 3) == [1, 2, 0]
    # A rank gives a group that was played again before its later ones.
    assert counts_of_complete([[(5, 0), (1, 2), (1, 4)], [(4, 1), (4, 3)]], 3) == [1, 2]


@pytest.mark.parametrize("counts", [[2, 2, 1], [0, 3, 1], [5, 0, 0], [1, 0, 4]])
def test_positions_are_those_of_a_batch(counts: list[int]) -> None:
    positions = [[position_of(place, rank, counts) for place in range(count)] for rank, count in enumerate(counts)]
    assert sorted(position for its in positions for position in its) == list(range(sum(counts)))
    assert all(its == sorted(its) for its in positions)
    if counts == equal_counts(3, 5):
        assert positions == [[0, 3], [1, 4], [2]]


def test_groups_given_up_are_counted_by_the_next_group_of_their_rank() -> None:
    """A rank may give none to the batch after which it gives up groups."""
    made = plan(groups=4, group_size=1, max_staleness=1)
    # The second rank never answers to its first items, so that the batches are those of the first one.
    clients = [Slow(mean=0.1), Late()]
    run = train_on_ranks(clients, made, range(6), TRAINING)
    check(run, made)
    of_late: list[Group] = [group for ranks in run.batches for its in ranks for group in its if group.index % 2]
    assert of_late
    assert sum(group.cancelled for group in of_late) >= 4


class Late(Slow):
    """Does not answer before the third version."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        while self.version < 3:
            await asyncio.sleep(0.1)
        return await super().generate(prompt_ids, sampling)
