"""The thread that waits for the ranks, with ranks that reply when a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import RayActorError

from areal.dispatch.errors import WorkerLostError
from areal.dispatch.executor import Reply
from areal.dispatch.ray import replies
from areal.dispatch.ray import watch as module
from areal.dispatch.ray.actor import ProcessInfo, StackPosition
from areal.dispatch.ray.processes import Processes
from areal.dispatch.ray.results import seal
from areal.dispatch.ray.watch import Limits, Watch
from areal.tests.harness.limits import PROMPTLY, promptly, wait_until


class Rank:
    """The actor of a rank. Its methods return futures in place of references.

    Attributes:
        works: what was sent to it, unpickled, with the future of each reply.
        life: fails when the process ends.
        answers, moves: whether it answers where it is, and whether it is elsewhere each time.
        asked: number of questions where it is.
    """

    def __init__(self) -> None:
        self.works: list[tuple[Any, Any, Future[Any]]] = []
        self.life: Future[None] = Future()
        self.answers = self.moves = True
        self.asked = self._mark = 0
        self.run, self.live, self.position = map(Remote, (self._run, lambda: self.life, self._position))

    def _run(self, what: str, pickled: bytes, argument: Any, refs: list[Any]) -> Future[Any]:
        if argument == "cannot be sent":
            raise TypeError("cannot pickle a lock")
        self.works.append((cloudpickle.loads(pickled), argument, Future()))
        return self.works[-1][2]

    def _position(self) -> Future[StackPosition]:
        future: Future[StackPosition] = Future()
        self.asked += 1
        self._mark += self.moves
        if self.answers:
            future.set_result(StackPosition(self._mark, "somewhere"))
        return future

    def reply(self, call: int, value: Any = None, *, kind: str = "", text: str = "") -> None:
        """Reply to a call with a value, or with an error of this kind."""
        value = None if kind else seal(value, "the result", 2**20)
        self.works[call][2].set_result(Reply(value, kind, text, f"the trace of {text}" if kind else ""))


class Remote:
    """A method of an actor."""

    def __init__(self, method: Callable[..., Future[Any]]) -> None:
        self._method = method

    def remote(self, *args: Any) -> Any:
        """Return a reference, of which the watch reads the future."""
        future = self._method(*args)
        return SimpleNamespace(future=lambda: future)


@pytest.fixture(autouse=True)
def ray_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.9")


@contextmanager
def watched(size: int, **limits: float) -> Iterator[tuple[Watch, list[Rank], list[str]]]:
    """Yield a watch, its ranks, and a list of the processes that were ended."""
    ranks, ended = [Rank() for _ in range(size)], list[str]()
    infos = [ProcessInfo(f"node{n}", f"10.0.0.{n}", 100 + n, n, (), (), ()) for n in range(size)]
    processes: Any = SimpleNamespace(
        actors=ranks,
        process_infos=infos,
        end=lambda: ended.append("all"),
        end_rank=lambda rank: ended.append(f"rank {rank}"),
    )
    watch = Watch(processes, Limits(**{"hang_seconds": 600.0, "grace_seconds": 600.0} | limits))
    try:
        yield watch, ranks, ended
    finally:
        watch.end(RuntimeError("closed"))
        watch.join()
        assert not watch._thread.is_alive()


def test_calls_are_completed_as_their_replies_come() -> None:
    with watched(2) as (watch, ranks, ended):
        first, second = (watch.submit(f"call {n}", ["work", n], [n, n]) for n in (1, 2))
        assert [work[:2] for work in ranks[1].works] == [(["work", 1], 1), (["work", 2], 2)]
        ranks[0].reply(0, "a")
        ranks[0].reply(1, "c")
        ranks[1].reply(0, "b")
        assert [its.value for its in first.result(10)] == ["a", "b"]
        assert not second.done()
        ranks[1].reply(1, kind="ValueError", text="too long")
        assert [its.text for its in second.result(10)] == ["", "too long"]
        assert (watch.error, ended) == (None, [])


def test_first_error_is_raised_when_the_other_ranks_wait_for_it() -> None:
    """And not that they wait. The loss is its consequence."""
    with watched(2, grace_seconds=0.3) as (watch, ranks, ended), promptly():
        # Rank 0 goes on to the next call, and waits there.
        ranks[0].moves = ranks[1].moves = False
        failing, behind = watch.submit("run", None, [0, 0]), watch.submit("train_batch", None, [0, 0])
        ranks[0].reply(0, kind="RuntimeError", text="ZeroDivisionError: the first error")
        message = r"(?s)^rank 0: ZeroDivisionError: the first error\nAnd: rank 1 \(pid 101 .*has not moved for 0.3 s.*restart\(\)"
        with pytest.raises(RuntimeError, match=message) as raised:
            failing.result(30)
        assert not isinstance(raised.value, WorkerLostError)
        assert "the trace of ZeroDivisionError" in str(raised.value.__cause__)
        with pytest.raises(WorkerLostError, match="has not moved"):
            behind.result(10)
        assert (ended, type(watch.error)) == (["rank 1"], WorkerLostError)
        with pytest.raises(WorkerLostError, match=r"(?s)later cannot run: rank 1 .*restart\(\)"):
            watch.submit("later", None, [0, 0])


def test_rank_that_does_not_answer_is_noticed_behind_other_calls() -> None:
    """While the other one moves, and long before ranks that do not move count as lost."""
    with watched(2, ping_seconds=0.4) as (watch, ranks, _), promptly():
        ranks[1].answers = False
        calls = [watch.submit(what, None, [0, 0]) for what in ("set_lr", "train_batch")]
        ranks[0].reply(0)
        for call in calls:
            with pytest.raises(WorkerLostError, match=r"rank 1 .*has not answered for 0.4 s .*during set_lr"):
                call.result(30)


def test_error_of_a_later_call_shortens_the_wait_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of rank 0 has noticed that rank 1 is lost, which still has an earlier call to answer."""
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.3)
    with watched(2) as (watch, ranks, _), promptly():
        ranks[1].moves = False
        earlier, later = (watch.submit(what, None, [0, 0]) for what in ("set_lr", "train_batch"))
        ranks[0].reply(0)
        ranks[0].reply(1, kind="RankLostError", text="rank 1 is silent")
        wait_until(earlier.done, "the wait has ended", PROMPTLY)
        with pytest.raises(WorkerLostError, match=r"rank 1 .*has not moved for 0.3 s"):
            earlier.result(30)
        with pytest.raises(RuntimeError, match=r"(?s)rank 0: rank 1 is silent\nAnd: rank 1"):
            later.result(10)


def test_rank_that_moves_is_waited_for() -> None:
    with watched(2, hang_seconds=0.3) as (watch, ranks, _):
        ranks[0].moves = False  # it waits for the other one
        call = watch.submit("train_batch", None, [0, 0])
        with pytest.raises(TimeoutError):
            call.result(1.0)
        ranks[0].reply(0)
        ranks[1].reply(0)
        assert len(call.result(10)) == 2


def test_time_in_which_the_driver_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a debugger or a paused machine, longer than the limits. Ranks that hang after that are noticed."""
    stopped = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped[0])
    for each in (module, replies):
        monkeypatch.setattr(each, "time", clock)
    with watched(2, hang_seconds=0.5) as (watch, ranks, _), promptly():
        call = watch.submit("train_batch", None, [0, 0])
        for seconds in (100.0, 200.0):
            asked = ranks[0].asked
            wait_until(lambda asked=asked: ranks[0].asked > asked, "the ranks are asked")
            stopped[0] = seconds
            asked = ranks[0].asked
            wait_until(lambda asked=asked: ranks[0].asked > asked + 1 or call.done(), "the ranks are asked again")
            assert watch.error is None
        ranks[0].moves = ranks[1].moves = False
        with pytest.raises(WorkerLostError, match=r"has not moved for 0.5 s"):
            call.result(30)


def test_process_that_dies_ends_the_calls_and_names_the_errors_of_others() -> None:
    with watched(2) as (watch, ranks, ended), promptly():
        calls = [watch.submit(what, None, [0, 0]) for what in ("train_batch", "save")]
        ranks[0].reply(0, kind="RankLostError", text="connection closed by rank 1")
        ranks[1].life.set_exception(RayActorError())
        message = r"(?s)rank 1 .* died during train_batch.*restart\(\).*And: rank 0: connection closed by rank 1"
        with pytest.raises(WorkerLostError, match=message) as raised:
            calls[0].result(10)
        assert (raised.value.rank, raised.value.pid) == (1, 101)
        with pytest.raises(WorkerLostError, match="died during train_batch"):
            calls[1].result(10)
        assert ended == ["rank 1"]


def test_process_that_dies_between_calls_is_noticed() -> None:
    with watched(1) as (watch, ranks, _):
        ranks[0].life.set_exception(RayActorError())
        wait_until(lambda: watch.error is not None, "the loss is noticed")
        assert "died between calls" in str(watch.error)
        with pytest.raises(RuntimeError, match=r"next cannot run: rank 0 .*died between calls") as raised:
            watch.submit("next", None, [0])
        assert isinstance(raised.value, WorkerLostError)
        assert (raised.value.rank, raised.value.pid) == (0, 100)


def test_call_that_some_ranks_got_ends_all() -> None:
    with watched(2) as (watch, ranks, ended):
        running = watch.submit("train_batch", None, [0, 0])
        with pytest.raises(ValueError, match="the arguments of set_lr cannot be sent"):
            watch.submit("set_lr", None, ["cannot be sent", 0])
        ranks[0].reply(0)
        with pytest.raises(
            RuntimeError, match=r"set_lr was sent to some ranks only: cannot pickle a lock: call restart\(\)"
        ):
            watch.submit("set_lr", None, [0, "cannot be sent"])
        assert ended == ["all"]
        with pytest.raises(RuntimeError, match="sent to some ranks only"):
            running.result(10)


def test_work_is_pickled_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or value)
    with watched(4) as (watch, ranks, _):
        watch.submit("small", b"work", [0] * 4)
        assert not stored
        watch.submit("large", bytes(2**20), [0] * 4)
        assert len(stored) == 1
        assert all(rank.works[1][0] == bytes(2**20) for rank in ranks)


def test_end_without_ray_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group may be collected after ray.shutdown()."""
    calls: list[Any] = []
    monkeypatch.setattr(ray, "kill", calls.append)
    for there in (False, True):
        monkeypatch.setattr(ray, "is_initialized", lambda there=there: there)
        Processes(("actor",), (), None).end()
        assert calls == (["actor"] if there else [])
