"""A state that is loaded while episodes run: the run goes on from it, and nothing of the interrupted run is left."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from areal.tests.harness.limits import wait_until
from areal.tests.unit.rollout.runs import Client, batches, episode, running, tokens
from areal.trainer.rollout.plan import Plan


def wait_for_requests(client: Client, count: int) -> None:
    wait_until(lambda: len(client.asked) >= count, f"{count} requests were sent")


@pytest.mark.parametrize("staleness", [0, 1])
def test_state_loaded_during_a_run_replaces_running_episodes(staleness: int) -> None:
    plan = Plan(groups=3, group_size=2, max_staleness=staleness)
    slow, first = threading.Event(), plan.groups * plan.group_size
    # Groups after those of the first batch hang, so that the state contains none of them.
    slow.set()
    client = Client(lambda: 30.0 if slow.is_set() and len(client.asked) > first else 0.0)
    with running(client, episode(), plan) as runner:
        runner.advance(0)
        runner.next_batch(timeout=20)
        wait_for_requests(client, first * (1 + staleness))
        state = runner.state_dict()
        assert not state["waiting"]
        # Further groups begin, and hang when the state is loaded.
        runner.advance(1)
        wait_for_requests(client, first * (2 + staleness))
        slow.clear()
        runner.load_state_dict(state)
        # Nothing starts before the weights are sent again.
        asked = len(client.asked)
        time.sleep(0.3)
        assert len(client.asked) == asked
        rest = []
        for trained in range(1, 5):
            runner.advance(trained)
            rest.append(tokens(runner.next_batch(timeout=20)))
        # Groups that may be played ahead end, and no others begin.
        wait_until(lambda: len(runner.state_dict()["waiting"]) >= plan.groups * staleness, "groups wait")
        time.sleep(0.1)
        left = runner.state_dict()
    assert rest == batches(5, plan)[1:]
    assert len(left["waiting"]) == plan.groups * staleness


def test_state_that_is_read_before_the_first_advance_starts_nothing() -> None:
    client = Client()
    with running(client, episode(), Plan(groups=3)) as runner:
        assert runner.state_dict() == runner.NOTHING_PLAYED | {"order": runner.plan.order(len(runner._items))}
        time.sleep(0.1)
        assert not client.asked


@pytest.mark.parametrize(
    ("n_items", "changes", "says"),
    [
        (8, {}, "len\\(items\\) = 8, and the run was saved with 16"),
        (16, {"groups": 2}, "Plan.groups = 2, and the run was saved with 4"),
        (16, {"seed": 1}, "Plan.seed = 1, and the run was saved with 0"),
        (16, {"shuffle": False}, "Plan.shuffle = 0, and the run was saved with 1"),
    ],
)
def test_another_order_of_groups_is_refused(n_items: int, changes: dict[str, Any], says: str) -> None:
    saved = Plan(groups=4).order(16)
    with pytest.raises(ValueError, match=says):
        Plan(**{"groups": 4} | changes).check_order(n_items, saved)
    Plan(groups=4, group_size=7).check_order(16, saved)
    Plan(groups=2).check_order(8, {})  # a state of an earlier release
