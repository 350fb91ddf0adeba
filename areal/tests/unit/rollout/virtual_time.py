"""A runner whose event loop has a clock of its own: where all sleep, it goes to the end of the next sleep at once."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.runner import Runner


class _Selector(selectors.DefaultSelector):
    """Advances the clock of its loop instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0 if timeout is not None else None)
        if not events and timeout:
            self.loop.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose time passes only while all tasks sleep."""

    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.loop, self.now = self, 0.0

    def time(self) -> float:
        return self.now


_patching = threading.Lock()


def virtual_runner(*args: Any, **options: Any) -> Runner:
    """Return a runner on a :class:`VirtualLoop`. May be called by several threads."""
    # Patches of two threads that overlap would not both be undone.
    with _patching, pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", VirtualLoop)
        return Runner(*args, **options)


def train(
    runner: Runner,
    steps: range,
    seconds: float,
    each: Callable[[int, list[Group]], None],
    sync: Callable[[int], None],
    next_groups: Callable[[float], list[Group]] | None = None,
) -> float:
    """Train on batches, on the runner's clock.

    Args:
        runner: made by :func:`virtual_runner`.
        steps: numbers of the batches.
        seconds: time of a step.
        each: gets the number of each batch, and the batch.
        sync: called with the number of batches trained on, before the runner advances.
        next_groups: returns the next batch, from a time limit. Defaults to the runner's own groups.

    Returns:
        Fraction of the time in which the trainer waited for a batch.
    """

    async def run() -> float:
        idle, begin = 0.0, runner._loop.time()
        sync(steps.start)
        runner.advance(steps.start)
        for step in steps:
            while (groups := _taken(next_groups or runner.next_batch)) is None:
                await asyncio.sleep(POLL)
                idle += POLL
            each(step, groups)
            await asyncio.sleep(seconds)
            sync(step + 1)
            runner.advance(step + 1)
        return idle / (runner._loop.time() - begin)

    return on_loop(runner, run())


def on_loop(runner: Runner, work: Awaitable[float]) -> float:
    """Run a coroutine on the loop of a runner."""
    return asyncio.run_coroutine_threadsafe(work, runner._loop).result(120)  # type: ignore[arg-type]


POLL = 0.02
"""Seconds between two looks at a runner, on its clock."""


def _taken(next_groups: Callable[[float], list[Group]]) -> list[Group] | None:
    try:
        return next_groups(0.0)
    except TimeoutError:
        return None
