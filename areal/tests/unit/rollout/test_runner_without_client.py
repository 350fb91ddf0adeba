"""A runner without a client: another rank generates, and this one plays nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from areal.dispatch.shared_devices import SharedDevices
from areal.dispatch.shared_devices.shared_rollout import SharedRollout
from areal.tests.unit.rollout.runs import ITEMS, Client, episode, running
from areal.trainer.rollout.exchange import RolloutExchange, set_runner_state
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner

PLAN = Plan(groups=4, max_staleness=1)


class Elsewhere(Client):
    """A rollout whose servers another rank owns."""

    owns_servers = False


def shared_elsewhere() -> SharedRollout:
    """Return such a rollout on shared devices."""
    return SharedDevices({"gpu": 10}).add_rollout("rollout", AsleepElsewhere(), 6)


class AsleepElsewhere(Elsewhere):
    """It does nothing when it is asked to sleep or to wake."""

    asleep = False

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass


@pytest.mark.parametrize(
    "client",
    [None, Elsewhere(), shared_elsewhere(), shared_elsewhere().client],
    ids=["none", "servers of another rank", "on shared devices", "client on shared devices"],
)
def test_runner_without_client_has_empty_batches_at_once(client: Any) -> None:
    """It starts no thread, and reads no items."""
    threads = threading.active_count()
    with running(client, episode(), PLAN) as runner:
        assert threading.active_count() <= threads
        assert runner.next_batch(timeout=0) == []
        for trained in range(3):
            runner.advance(trained)
            assert runner.next_batch(timeout=0) == []
        assert (runner.plays, runner.per_batch, runner.rank) == (False, 0, -1)
        assert runner.state_dict() == Runner.NOTHING_PLAYED | {"trained": 2}
    with pytest.raises(RuntimeError, match="the runner is closed"):
        runner.next_batch()
    runner.close()
    Runner(None, episode(), [], PLAN).close()


def test_close_without_client_ends_the_episode_and_what_depends_on_it() -> None:
    ended: list[str] = []

    class Ending:
        async def run(self, client: Any, item: int) -> list[Any]:
            return []

        def close(self) -> None:
            ended.append("episode")

    runner = Runner(None, Ending(), ITEMS, PLAN)
    runner.at_close(lambda: ended.append("exchange"))
    runner.close()
    runner.close()
    assert ended == ["episode", "exchange"]


@pytest.mark.parametrize("waiting", [[], [0.5]], ids=["nothing", "a replaced group"])
def test_state_of_the_owner_leaves_nothing_to_play(waiting: list[Any]) -> None:
    """Also with groups that were replaced, and with another number of ranks."""
    state = {"trained": 3, "consumed": 14, "rejected": 2, "waiting": waiting}
    with running(None, episode(), PLAN, rank=-1, size=1) as runner:
        set_runner_state(runner, [state])
        assert runner.state_dict() == Runner.NOTHING_PLAYED | {"trained": 3}
        runner.advance(3)
        assert runner.next_batch(timeout=0) == []
        set_runner_state(runner, [state, state])
        assert runner.state_dict() == Runner.NOTHING_PLAYED | {"trained": 3}


def test_place_without_client() -> None:
    """None that plays groups is refused by the exchange of all ranks; see there."""
    for wrong in ({"rank": -2, "size": 1}, {"rank": 1, "size": 1}, {"rank": -1}):
        with pytest.raises(ValueError, match="0 <= rank < size"):
            Runner(None, episode(), ITEMS, PLAN, **wrong)
    with pytest.raises(ValueError, match="rank = -1, size = 1"):
        Runner(Client(), episode(), ITEMS, PLAN, rank=-1, size=1)
    with running(None, episode(), PLAN) as runner, pytest.raises(ValueError, match="client = None on all 1 ranks"):
        RolloutExchange(runner, 0)
