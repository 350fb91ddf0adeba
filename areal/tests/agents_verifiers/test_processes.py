"""Processes of harnesses end with their episode, also when the runner is killed, or closed while the environment starts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: make test-agents")

from areal.integrations.verifiers.reaper import Reaper
from areal.tests.agents_verifiers.killed_runner import Waiting
from areal.tests.agents_verifiers.pupil import Oracle, episode
from areal.trainer.rollout import Plan, Runner

SECONDS = 60.0
"""Limit of each wait."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def sleeping(processes: list[psutil.Process]) -> int:
    """Return the number of commands that do not end."""
    found = 0
    for each in processes:
        try:
            found += each.name() == "sleep"
        except psutil.NoSuchProcess:
            continue
    return found


def test_killed_runner_leaves_no_process() -> None:
    command = [sys.executable, "-m", "areal.tests.agents_verifiers.killed_runner"]
    runner = psutil.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        # Two for each of three episodes.
        until(lambda: sleeping(runner.children(recursive=True)) == 6)
        processes = runner.children(recursive=True)
        assert len({each.pid for each in processes}) > 9
    finally:
        runner.kill()
        runner.wait()
    _, alive = psutil.wait_procs(processes, timeout=SECONDS)
    assert not alive


def test_closed_runner_leaves_no_process() -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    made = episode("bash")
    runner = Runner(Waiting("bash"), made, made.tasks(), Plan(3, 1))
    try:
        runner.advance(0)
        until(lambda: sleeping(psutil.Process().children(recursive=True)) == 6)
        processes = psutil.Process().children(recursive=True)
    finally:
        runner.close()
    # Commands in sessions of their own are no descendants any more once their parents are gone.
    left = [each for each in processes if each.pid not in before and each.is_running()]
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == [], left


def test_runner_closed_while_the_environment_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    made = episode("null")
    serving, started = made.environment.serving, threading.Event()

    @contextlib.asynccontextmanager
    async def never_ready() -> AsyncIterator[None]:
        async with serving():  # the tool server
            started.set()
            await asyncio.sleep(3600)
            yield

    monkeypatch.setattr(made.environment, "serving", never_ready)
    runner = Runner(Oracle("null"), made, made.tasks(), Plan(1, 1))
    try:
        runner.advance(0)
        assert started.wait(SECONDS)
        processes = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
        assert len(processes) > 1  # the reaper is one
    finally:
        runner.close()
    _, alive = psutil.wait_procs(processes, timeout=SECONDS)
    assert not alive


@pytest.fixture
def forking() -> Iterator[tuple[subprocess.Popen[str], psutil.Process, psutil.Process]]:
    """A process with a reaper, its forked child, and a program with the mark."""
    command = [sys.executable, "-m", "areal.tests.agents_verifiers.forking", secrets.token_hex(16)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    child, program = (psutil.Process(int(pid)) for pid in process.stdout.readline().split())
    yield process, child, program
    child.kill()
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("killed", [False, True])
def test_forked_child_does_not_delay_the_end_of_programs(
    killed: bool, forking: tuple[subprocess.Popen[str], psutil.Process, psutil.Process]
) -> None:
    process, child, program = forking
    assert process.stdin is not None
    if killed:
        process.kill()
    else:
        process.stdin.write("leave\n")
        process.stdin.flush()
    assert process.wait(SECONDS) == (-signal.SIGKILL if killed else 0)
    _, alive = psutil.wait_procs([program], timeout=SECONDS)
    assert not alive
    assert child.is_running()


def test_reaper_that_was_killed_can_be_left() -> None:
    async def leave() -> None:
        before = set(psutil.Process().children())
        async with Reaper(secrets.token_hex(16)):
            (process,) = set(psutil.Process().children()) - before
            process.kill()
            psutil.wait_procs([process], timeout=SECONDS)

    asyncio.run(asyncio.wait_for(leave(), SECONDS))
