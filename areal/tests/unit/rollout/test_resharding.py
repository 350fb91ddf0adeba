"""A run with replaced groups that goes on with another number of ranks: every batch is played, within the bound of staleness."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from areal.trainer.rollout.order import GroupOrder, Share, order_of, resharded
from areal.trainer.rollout.plan import Group, Plan

Rank = tuple[GroupOrder, Share]


def ranks_of(plan: Plan, size: int) -> list[Rank]:
    return [(order_of(plan), Share(rank, size, plan.groups)) for rank in range(size)]


def end(rank: Rank, number: int, salt: int) -> None:
    """End a group. Of all groups, 60 % are kept."""
    order, share = rank
    index = share.index(number)
    order.end(number, Group(index, ()) if random.Random(salt * 1009 + index).random() < 0.6 else 0.5)


def begin(ranks: list[Rank], trained: int) -> None:
    for order, share in ranks:
        while order.begin(trained, share) is not None:
            pass


def trained_on(ranks: list[Rank], plan: Plan, steps: range, salt: int) -> list[int]:
    """Play and train. Returns the indices of the groups of all batches."""
    used: list[int] = []
    for trained in steps:
        begin(ranks, trained)
        while any(order.select(share.per_batch) is None for order, share in ranks):
            assert any(order.running for order, _ in ranks), f"batch {trained} is never complete"
            for order, share in ranks:
                for number in list(order.running):
                    end((order, share), number, salt)
            begin(ranks, trained)
        for order, share in ranks:
            batch = [order.waiting[number] for number in order.select(share.per_batch) or ()]
            assert all(trained - each.begun <= plan.max_staleness for each in batch if isinstance(each.played, Group))
            groups, _ = order.take(share.per_batch) or ([], [])
            assert len(groups) == share.per_batch
            used += [group.index for group in groups]
    begin(ranks, steps.stop)
    return used


def state_of(order: GroupOrder, trained: int) -> dict[str, Any]:
    state = order.state()
    waiting = [each.state() if isinstance(each, Group) else each for each in state["waiting"]]
    return {**state, "trained": trained, "waiting": waiting}


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_every_batch_is_played_within_the_bound(before: int, after: int, in_order: bool) -> None:
    for staleness, salt in itertools.product((0, 1, 2), range(25)):
        plan = Plan(groups=8, group_size=2, max_staleness=staleness, in_order=in_order)
        ranks = ranks_of(plan, before)
        used = trained_on(ranks, plan, range(6), salt)
        # Half of the groups that run have ended when the state is saved.
        rng = random.Random(salt)
        for order, share in ranks:
            for number in sorted(order.running):
                if rng.random() < 0.5:
                    end((order, share), number, salt)
        states = [state_of(order, 6) for order, _ in ranks]
        others = ranks_of(plan, after)
        for order, share in others:
            order.load(resharded(states, share, plan), share)
        used += trained_on(others, plan, range(6, 10), salt)
        assert len(used) == len(set(used)) == 10 * plan.groups
