"""Turns of several threads on one device: they wait for each other, and none waits for ever."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from areal.dispatch.shared_devices import Kind, Move, Need, Part, Placement, Use
from areal.dispatch.shared_devices.place import Place
from areal.dispatch.shared_devices.shared_rollout import SharedRollout
from areal.dispatch.shared_devices.turns import Turn, Turns
from areal.tests.harness.limits import wait_until

LIMIT = 8.0
"""Seconds after which a thread counts as stuck."""


class Device:
    """A device of ten bytes: models of four bytes of weights and four more of optimizer state, and a rollout of six.

    Attributes:
        here: parts on the device, as the moves left it.
        inside: uses that have begun.
        most: bytes on the device at most.
    """

    def __init__(self, models: Sequence[str] = ("a", "b", "c")) -> None:
        self.placement = Placement({"gpu": 10})
        for name in models:
            self.placement.add_model(name, weights={"gpu": 4}, gradients={"gpu": 0}, optimizer={"gpu": 4})
        self.placement.add_rollout("rollout", {"gpu": 6})
        self.here: set[Part] = set()
        self.observed: list[str] = []
        self.most = 0
        self.movers: set[int] = set()
        self.turns = Turns(self.placement, self.move, self.observe)

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            # Another thread that moved now would meet this one.
            assert not self.movers
            self.movers.add(threading.get_ident())
            (self.here.add if move.to_device else self.here.discard)(move.part)
            self.most = max(self.most, sum(self.placement.sizes(part)["gpu"] for part in self.here))
            self.movers.clear()

    def observe(self, ended: Mapping[str, Any]) -> list[str]:
        self.observed += ended
        return []

    def turn(self, name: str, use: Use = Use.FORWARD, **options: Any) -> Turn:
        return Turn(self.turns, Need(name, use), **options)

    @contextmanager
    def using(self, name: str, use: Use = Use.FORWARD) -> Iterator[None]:
        turn = self.turn(name, use)
        turn.begin()
        try:
            yield
        finally:
            turn.end()


def started(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def result(future: Future[Any]) -> Any:
    """Return the result of a thread, which must not wait for ever."""
    assert not wait([future], LIMIT).not_done, "a thread waits for ever"
    return future.result()


def begun(turn: Turn) -> Future[Any]:
    """Begin a use in a thread, and wait until it waits for its turn or has begun."""
    future = started(turn.begin)
    wait_until(lambda: turn in turn._turns._waiting or future.done())
    return future


# ---- waiting


def test_use_waits_for_a_call_that_runs_on_the_ranks() -> None:
    device, call = Device(), Future[Any]()
    step = device.turn("a", Use.STEP)
    step.begin()
    step.end_with(call)
    other = begun(device.turn("b"))
    assert not other.done()
    # It has ended on the ranks, and nothing waits for its result.
    call.set_result([])
    result(other)
    assert device.here == {Part("b", Kind.WEIGHTS), Part("a", Kind.WEIGHTS)}
    assert device.observed == ["a"]


def test_call_that_failed_ends_its_use() -> None:
    device, call = Device(), Future[Any]()
    step = device.turn("a", Use.STEP)
    step.begin()
    step.end_with(call)
    call.set_exception(RuntimeError("a rank was lost"))
    result(begun(device.turn("b")))


def test_nothing_of_a_model_moves_during_its_call() -> None:
    """Its optimizer state is not needed, and would make room: but an offload may wait for the call, and the call for the offload."""
    device, call = Device(), Future[Any]()
    with device.using("a", Use.STEP):
        pass
    forward = device.turn("a", call=True)
    forward.begin()
    forward.end_with(call)
    other = begun(device.turn("b"))
    step = begun(device.turn("a", Use.STEP, call=True))
    # Nothing is in the way of a use that needs no move.
    result(step)
    assert not other.done()
    call.set_result([])
    device.here.clear()
    device.turns.remove("a")
    result(other)


def test_call_that_needs_more_of_its_model_waits_for_the_one_before() -> None:
    device, call = Device(), Future[Any]()
    forward = device.turn("a", call=True)
    forward.begin()
    forward.end_with(call)
    # As it is after a step of another process, which was offloaded.
    device.placement.observe(Part("a", Kind.OPTIMIZER), {"gpu": 4}, existing=True, on_device=False)
    step = begun(device.turn("a", Use.STEP, call=True))
    assert not step.done()
    call.set_result([])
    result(step)


def test_nested_use_that_cannot_fit_raises_instead_of_waiting_for_itself() -> None:
    device = Device()

    def nested() -> None:
        with device.using("a", Use.STEP):
            device.turn("b").begin()

    with pytest.raises(ValueError, match=r"'b' needs 4 bytes .* of which 8 are in use by"):
        result(started(nested))
    # It has left nothing.
    result(begun(device.turn("b", Use.STEP)))


def test_threads_that_wait_for_each_other_raise() -> None:
    """Each has four bytes, and wants eight: one of both raises, and the other goes on."""
    device, meet = Device(), threading.Barrier(2)

    def nested(name: str) -> str:
        with device.using(name):
            meet.wait(LIMIT)
            try:
                with device.using(name, Use.STEP):
                    return "ran"
            except ValueError:
                return "raised"

    outcomes = [started(partial(nested, name)) for name in "ab"]
    assert sorted(result(outcome) for outcome in outcomes) == ["raised", "ran"]


def test_use_that_can_never_fit_raises_at_once() -> None:
    device, call = Device(), Future[Any]()
    device.placement.add_model("large", weights={"gpu": 11}, gradients={}, optimizer={})
    step = device.turn("a", Use.STEP)
    step.begin()
    step.end_with(call)
    with pytest.raises(ValueError, match="'large' needs 11 bytes"):
        result(begun(device.turn("large")))


def test_threads_never_exceed_the_budget_and_all_end() -> None:
    device = Device()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(15):
            name = draw.choice("abc")
            with device.using(name, draw.choice([Use.FORWARD, Use.STEP, Use.SYNC, Use.CHANGE])):
                if draw.random() < 0.3:
                    with device.using(name, Use.FORWARD):
                        pass
            call = Future[Any]()
            turn = device.turn(draw.choice("abc"), Use.STEP)
            turn.begin()
            turn.end_with(call)
            started(lambda call=call: call.set_result([]))

    for future in [started(partial(work, seed)) for seed in range(4)]:
        result(future)
    assert 8 <= device.most <= 10


def test_moves_may_call_the_engines_that_begin_uses() -> None:
    """A group onloads by a verb, which begins a use in the thread that moves."""
    device = Device()
    right = device.move

    def move(moves: Sequence[Move]) -> None:
        with device.using("a", Use.ALL):
            right(moves)

    device.turns._move = move
    result(begun(device.turn("b")))
    assert not device.turns._active[1:]


def test_removed_model_ends_its_uses() -> None:
    device, call = Device(), Future[Any]()
    step = device.turn("a", Use.STEP)
    step.begin()
    step.end_with(call)
    other = begun(device.turn("b", Use.STEP))
    device.here.clear()
    device.turns.remove("a")
    result(other)
    call.set_result([])
    assert "a" not in device.placement


# ---- generations


class Rollout:
    """A rollout whose answers are given by the test."""

    version = 3

    def __init__(self) -> None:
        self.asleep = True
        self.answers: list[asyncio.Future[str]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Any) -> str:
        assert not self.asleep
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]


def rollout_on(device: Device) -> tuple[Rollout, SharedRollout]:
    rollout = Rollout()
    right = device.move

    def move(moves: Sequence[Move]) -> None:
        right(moves)
        rollout.asleep = Part("rollout", Kind.ROLLOUT) not in device.here

    device.turns._move = move
    return rollout, SharedRollout(rollout, Place(device.turns, "rollout", device.turns.remove))


def test_verb_waits_for_running_answers_and_later_answers_wait_for_the_verb() -> None:
    device = Device()
    rollout, shared = rollout_on(device)

    async def play() -> None:
        first = asyncio.create_task(shared.generate([1], None))
        await until(lambda: len(rollout.answers) == 1)
        second = asyncio.create_task(shared.generate([1], None))
        await until(lambda: len(rollout.answers) == 2)
        step = await asyncio.to_thread(device.turn, "a", Use.STEP)
        stepping = asyncio.create_task(asyncio.to_thread(step.begin))
        await until(lambda: step in device.turns._waiting)
        rollout.answers[0].set_result("first")
        assert await first == "first"
        # There is room for a third one, but it would keep the step waiting.
        third = asyncio.create_task(shared.generate([1], None))
        await asyncio.sleep(0.05)
        assert len(rollout.answers) == 2
        assert not stepping.done()
        rollout.answers[1].set_result("second")
        assert await second == "second"
        await stepping
        assert rollout.asleep
        assert len(rollout.answers) == 2
        step.end()
        await until(lambda: len(rollout.answers) == 3)
        rollout.answers[2].set_result("third")
        assert await third == "third"

    asyncio.run(asyncio.wait_for(play(), LIMIT))
    assert device.most <= 10


def test_answer_that_is_awaited_inside_a_use_raises_where_it_does_not_fit() -> None:
    device = Device()
    _, shared = rollout_on(device)

    def nested() -> None:
        with device.using("a", Use.STEP):
            asyncio.run(shared.generate([1], None))

    with pytest.raises(ValueError, match=r"'rollout' needs 6 bytes .* of which 8 are in use by others"):
        result(started(nested))


def test_cancelled_answer_leaves_no_thread_and_no_use() -> None:
    device = Device()
    _, shared = rollout_on(device)
    step = result(started(lambda: device.turn("a", Use.STEP)))
    step.begin()

    async def play() -> None:
        waiting = asyncio.create_task(shared.generate([1], None))
        await until(lambda: len(device.turns._waiting) == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asyncio.wait_for(play(), LIMIT))
    assert not device.turns._waiting
    step.end()
    result(begun(device.turn("b", Use.STEP)))


def test_use_that_ends_during_a_measurement_does_not_begin() -> None:
    device = Device()

    def observe(ended: Mapping[str, Any]) -> list[str]:
        cancelled.end()
        return []

    device.turns = Turns(device.placement, device.move, observe)
    cancelled = device.turn("rollout", Use.GENERATE, background=True)
    with device.using("a"):
        pass
    cancelled.begin()
    result(begun(device.turn("b", Use.STEP)))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# ---- prediction


def test_a_repeated_cycle_moves_less_than_by_the_least_recently_used_rule() -> None:
    """Two of three models fit. That rule would move one out and one in for each use."""
    device = Device()
    for name in "abc" * 2:
        with device.using(name):
            pass
    before = device.placement.moved
    for name in "abc" * 4:
        with device.using(name):
            pass
    # Every second use finds its model on the device.
    assert device.placement.moved - before == 12 // 2 * 8
