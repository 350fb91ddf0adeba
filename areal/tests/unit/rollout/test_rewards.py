"""Rewards that are slow, hang or fail: they hold up nothing but their own episode."""

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from areal.inference.protocol import Completion, Sampling
from areal.tests.harness.limits import PROMPTLY, promptly, wait_until
from areal.trainer.rollout.episodes import SingleTurn
from areal.trainer.rollout.plan import Group, Plan
from areal.trainer.rollout.rewards import RewardPool
from areal.trainer.rollout.runner import Runner

ANSWER = Completion((5, 6), (-1.0, -2.0), (0, 0), "stop")


class Client:
    version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        return ANSWER


@contextmanager
def running(reward: Any, groups: int) -> Iterator[Runner]:
    runner = Runner(
        Client(), SingleTurn(lambda item: [item], reward, Sampling()), range(100), Plan(groups, shuffle=False)
    )
    try:
        yield runner
    finally:
        runner.close()


def play(reward: Any, groups: int) -> list[Group]:
    with running(reward, groups) as runner:
        runner.advance(0)
        return runner.next_batch(timeout=60)


def together(pool: RewardPool, items: Sequence[Any]) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.wait_for(
            asyncio.gather(*(pool(item, ANSWER) for item in items), return_exceptions=True), 60
        )

    return asyncio.run(all_of_them())


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "reward"}


def test_slow_reward_does_not_hold_up_other_episodes() -> None:
    """The first reward waits until another episode, which runs on the same event loop, has its reward."""
    other = threading.Event()

    def reward(item: int, answer: Completion) -> float:
        assert other.wait(PROMPTLY) if item == 0 else not other.set()
        return float(item)

    groups = play(reward, 2)
    assert [group.failed for group in groups] == [0, 0]
    assert [group.sequences[0].reward for group in groups] == [0.0, 1.0]


def test_number_of_concurrent_rewards_is_bounded() -> None:
    running_now, most, lock = [0], [0], threading.Lock()

    def reward(item: int, answer: Completion) -> float:
        with lock:
            running_now[0] += 1
            most[0] = max(most[0], running_now[0])
        time.sleep(0.02)
        with lock:
            running_now[0] -= 1
        return 1.0

    pool = RewardPool(reward, workers=3, seconds=5)
    assert together(pool, range(12)) == [1.0] * 12
    assert most == [3]
    pool.close()


@pytest.mark.parametrize("workers", [1, 4])
def test_hanging_reward_fails_its_episode_only(workers: int) -> None:
    """The error names the item. The thread is replaced, so that even a pool of one goes on. Time in the queue does not count."""
    end = threading.Event()

    def reward(item: int, answer: Completion) -> float:
        if item == 1:
            end.wait(2 * PROMPTLY)
        time.sleep(0.02)
        return 1.0

    with promptly():
        groups = play(RewardPool(reward, workers=workers, seconds=1.0), 8)
    end.set()
    assert [group.failed for group in groups] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert groups[1].error == "TimeoutError: the reward of the item 1 took longer than 1 s"


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (KeyError("no unit"), "KeyError: 'no unit'"),
        (StopIteration(), "RuntimeError: the reward raised StopIteration"),
        (SystemExit(3), "RuntimeError: the reward raised SystemExit: 3"),
        (TimeoutError("sandbox"), "TimeoutError: sandbox"),
    ],
)
def test_reward_that_raises_fails_its_episode_only(raised: BaseException, text: str) -> None:
    def reward(item: int, answer: Completion) -> float:
        if item == 0:
            raise raised
        return 1.0

    async def awaited(item: int, answer: Completion) -> float:
        return reward(item, answer)

    for function in (reward, awaited):
        groups = play(function, 3)
        assert [group.failed for group in groups] == [1, 0, 0]
        if not (function is awaited and isinstance(raised, StopIteration)):  # Python names that one itself
            assert groups[0].error == text


def test_episode_that_exits_has_failed_and_a_task_of_it_ends_the_run() -> None:
    class Exits:
        async def run(self, client: Client, item: int) -> list[Any]:
            async def leave() -> None:
                raise SystemExit(4)

            if item == 0:
                await leave()
            if item == 2:
                await asyncio.gather(leave(), asyncio.sleep(0.1))
            return await SingleTurn(lambda item: [item], lambda item, answer: 1.0, Sampling()).run(client, item)

    runner = Runner(Client(), Exits(), range(100), Plan(2, shuffle=False))
    try:
        with promptly():
            runner.advance(0)
            groups = runner.next_batch(timeout=60)
            assert [group.error for group in groups] == ["RuntimeError: the episode raised SystemExit: 4", None]
            runner.advance(1)
            with pytest.raises(RuntimeError, match="a task of an episode raised SystemExit: 4"):
                runner.next_batch(timeout=60)
    finally:
        runner.close()


def wrong_unit(item: int, answer: Completion) -> float:
    raise KeyError("no unit")


async def wrong_unit_later(item: int, answer: Completion) -> float:
    return wrong_unit(item, answer)


@pytest.mark.parametrize(
    "reward",
    [
        wrong_unit,
        wrong_unit_later,
        lambda item, answer: wrong_unit_later(item, answer),
        RewardPool(wrong_unit),
        RewardPool(wrong_unit_later),
        RewardPool(lambda item, answer: wrong_unit_later(item, answer)),
        RewardPool(wrong_unit, processes=True, workers=1),
    ],
    ids=["function", "coroutine", "awaitable", "thread", "coroutine of a pool", "awaitable of a thread", "process"],
)
def test_failure_of_a_reward_has_its_file_and_line(reward: Any) -> None:
    traceback = play(reward, 1)[0].traceback
    line = wrong_unit.__code__.co_firstlineno + 1
    assert traceback is not None
    assert f'File "{__file__}", line {line}, in wrong_unit' in traceback
    assert "KeyError: 'no unit'" in traceback


def test_coroutine_rewards_run_on_the_event_loop() -> None:
    async def reward(item: int, answer: Completion) -> float:
        await asyncio.sleep(60 if item == 1 else 0)
        assert threading.current_thread().name == "rollout"
        return 0.5

    before = workers()
    groups = play(RewardPool(reward, seconds=0.3), 2)
    assert [group.error for group in groups] == [None, "TimeoutError: the reward of the item 1 took longer than 0.3 s"]
    assert not workers() - before
    # A plain function that returns a coroutine.
    assert [group.sequences[0].reward for group in play(lambda *args: reward(*args), 1)] == [0.5]


def test_closed_runner_ends_threads_and_the_episode_can_be_used_again() -> None:
    before, episode = workers(), SingleTurn(lambda item: [item], lambda item, answer: 1.0, Sampling())
    for _ in range(2):
        runner = Runner(Client(), episode, range(4), Plan(4))
        runner.advance(0)
        assert [group.failed for group in runner.next_batch(timeout=20)] == [0] * 4
        assert workers() - before
        runner.close()
        wait_until(lambda: not workers() - before)


def test_close_while_a_reward_hangs() -> None:
    begun, end = threading.Event(), threading.Event()

    def reward(item: int, answer: Completion) -> float:
        begun.set()
        end.wait(60)
        return 1.0

    with running(reward, 1) as runner:
        runner.advance(0)
        assert begun.wait(PROMPTLY)
        with promptly():
            runner.close()


def in_process(item: float, answer: Completion) -> float:
    """Return the process, or misbehave: called in a process of a pool."""
    if item == 1:
        time.sleep(600)
    if item == 2:
        os._exit(3)
    if item == 3:
        raise KeyError("no unit")
    if item == 4:
        signal.raise_signal(signal.SIGINT)
    return float(os.getpid())


def test_processes_run_rewards_and_are_killed_when_they_hang() -> None:
    pool = RewardPool(in_process, workers=1, processes=True, seconds=30)
    ok, raised, interrupted = together(pool, [0, 3, 4])
    assert ok == interrupted != os.getpid()
    assert str(raised) == "KeyError: 'no unit'"
    pool._seconds = 0.2
    (hung,) = together(pool, [1])
    assert "the item 1 took longer" in str(hung)
    wait_until(lambda: not Path(f"/proc/{int(ok)}").exists())
    pool.close()


def test_pool_of_processes_survives_one_that_ends() -> None:
    pool = RewardPool(in_process, workers=1, processes=True)
    ended, ok = together(pool, [2, 0])
    assert "ended with exit code 3" in str(ended)
    assert ok != os.getpid()
    pool.close()


def test_process_that_could_not_be_started_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SpawnProcess) -> None:
        monkeypatch.undo()
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(SpawnProcess, "start", refuse)
    pool = RewardPool(in_process, workers=1, processes=True)
    refused, ok = together(pool, [0, 0])
    assert isinstance(refused, BlockingIOError)
    assert ok != os.getpid()
    pool.close()


def test_process_of_a_late_call_is_killed_once_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    late, started, start = threading.Event(), list[SpawnProcess](), SpawnProcess.start

    def start_late(self: SpawnProcess) -> None:
        assert late.wait(PROMPTLY)
        start(self)
        started.append(self)

    monkeypatch.setattr(SpawnProcess, "start", start_late)
    (error,) = together(RewardPool(in_process, workers=1, processes=True, seconds=0.1), [0])
    late.set()
    assert str(error) == "the reward of the item 0 took longer than 0.1 s"
    wait_until(lambda: bool(started) and started[0].exitcode == -signal.SIGKILL)


async def coroutine_function(item: Any, answer: Completion) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("reward", "options", "error"),
    [
        (lambda item, answer: 1.0, {"processes": True}, r"RewardPool.processes.*cannot be pickled"),
        (coroutine_function, {"processes": True}, r"RewardPool.processes.*coroutine function"),
        (in_process, {"workers": 0}, "RewardPool.workers = 0"),
        (in_process, {"seconds": 0}, "RewardPool.seconds = 0"),
        (in_process, {"seconds": math.nan}, "RewardPool.seconds = nan"),
    ],
)
def test_invalid_options_are_refused(reward: Any, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        RewardPool(reward, **options)


def test_long_items_are_cut_in_the_error() -> None:
    (error,) = together(RewardPool(lambda item, answer: time.sleep(1) or 1.0, seconds=0.1), ["x" * 10_000])
    assert isinstance(error, TimeoutError)
    assert len(str(error)) < 300
