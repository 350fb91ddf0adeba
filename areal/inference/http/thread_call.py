"""A coroutine on the event loop of another thread, awaited on this one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """A coroutine that runs on the event loop of another thread. Every answer is one.

    ``run_coroutine_threadsafe`` and ``wrap_future`` do the same with three times as many objects, which the garbage collector visits again and
    again while thousands of answers wait.

    Args:
        work: the coroutine.
        there: event loop on which it runs.
    """

    def __init__(self, work: Coroutine[Any, Any, T], there: asyncio.AbstractEventLoop) -> None:
        self._work, self._there, self._here = work, there, asyncio.get_running_loop()
        self._task: asyncio.Task[T] | None = None
        self._result: asyncio.Future[T] = self._here.create_future()

    async def result(self) -> T:
        """Run the coroutine. Cancelling this cancels it, without waiting for its end."""
        self._there.call_soon_threadsafe(self._begin)
        try:
            return await self._result
        except asyncio.CancelledError:
            self._there.call_soon_threadsafe(self._cancel)
            raise

    # ---- there

    def _begin(self) -> None:
        self._task = self._there.create_task(self._work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        # A loop that was closed has nobody who waits.
        with contextlib.suppress(RuntimeError):
            self._here.call_soon_threadsafe(self._set, task, error)

    # ---- here

    def _set(self, task: asyncio.Task[T], error: BaseException | None) -> None:
        if self._result.done():
            return
        if task.cancelled():
            self._result.cancel()
        elif error is not None:
            self._result.set_exception(error)
        else:
            self._result.set_result(task.result())
