"""Functions of users in a bounded pool of threads or processes, with a time limit, so that generation continues meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from areal.utils.remote_traceback import RemoteTraceback

R = TypeVar("R")

_SHOWN = 200
"""Maximum number of characters of an argument in an error message."""


class CallPool:
    """Calls a function with at most ``workers`` calls at once. ``await pool(...)`` works on any event loop.

    A call that exceeds its time limit, or whose episode is cancelled, does not occupy the pool any more: its process is killed; its thread
    is replaced, and ends when the function returns. A coroutine function runs on the event loop of the caller.

    Args:
        function: several threads call it at the same time.
        workers: maximum number of concurrent calls.
        seconds: time limit of a call, from its start; ``None`` for no limit.
        processes: run in processes instead of threads, for functions that hold Python's lock for long or may hang. Function, arguments and
            results are pickled. The script must protect its main code by ``if __name__ == "__main__"``.

    Raises:
        ValueError: a number is out of range, or the function cannot run in a process.
    """

    noun = "call"
    """The function in error messages, and the name of its threads."""

    def __init__(
        self, function: Callable[..., Any], *, workers: int = 16, seconds: float | None = None, processes: bool = False
    ) -> None:
        name = type(self).__name__
        if workers < 1:
            raise ValueError(f"{name}.workers = {workers}: it must be at least 1")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name}.seconds = {seconds}: it must be above 0, or None for no limit")
        self._function, self._seconds, self._limit = function, seconds, workers
        self._is_async = is_async(function)
        if processes:
            _check_picklable(name, function, self._is_async)
        self._kind: type[_Thread] = _Process if processes else _Thread
        # Guards everything below, and is notified when a call arrives or the pool closes.
        self._changed = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._workers: set[_Thread] = set()  # those that take calls
        self._idle = 0
        self._closing = False
        self._late: set[asyncio.Future[None]] = set()  # results that are awaited, though nobody waits for them

    async def __call__(self, *args: Any) -> Any:
        """Return the result of a call.

        Raises:
            TimeoutError: it took longer than ``seconds``; names the first argument.
            RuntimeError: its process ended, or raised: the text has the type of the error.
            Exception: what the function raised.
        """
        if self._is_async:
            return await self._in_time(self._function(*args), args)
        call = _Call(args)
        self._submit(call)
        try:
            # The time in the queue does not count.
            await asyncio.wrap_future(call.started)
            return await self._in_time(_resolved(call), args)
        except BaseException:
            self._abandon(call)
            raise

    async def call_in_any_case(self, seconds: float, *args: Any) -> Any:
        """Return the result of a call that a worker runs also after ``seconds``, or if this coroutine is cancelled.

        What the function returns may be awaitable, and has the time limit of a call then.

        Raises:
            TimeoutError: no worker has run it in ``seconds``.
            Exception: what the function raised.
        """
        call = _Call(args)
        self._submit(call)
        try:
            async with asyncio.timeout(seconds):
                await _finished(call)
        except BaseException:
            late = asyncio.ensure_future(self._await_late(call, args))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            raise
        return await self._in_time(_resolved(call), args)

    async def _await_late(self, call: _Call, args: tuple[Any, ...]) -> None:
        """Await what a call returns for which nobody waits any more."""
        await _finished(call)
        with contextlib.suppress(Exception):
            await self._in_time(_resolved(call), args)

    def close(self) -> None:
        """End the workers that are idle; others end after their calls. The pool may be used again, with new workers."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def describe(self, argument: Any) -> str:
        """Return a call in words, by its first argument."""
        return f"the {self.noun} with {argument}"

    async def _in_time(self, work: Awaitable[Any], args: tuple[Any, ...]) -> Any:
        """Await within the time limit."""

        def late() -> str:
            shown = repr(args[0]) if args else ""
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            return f"{self.describe(shown)} took longer than {self._seconds:g} s"

        return await in_time(work, self._seconds, self.noun, late)

    def _submit(self, call: _Call) -> None:
        """Queue a call, and start a worker unless one is idle or the limit is reached."""
        with self._changed:
            self._closing = False
            self._calls.append(call)
            if len(self._calls) > self._idle and len(self._workers) < self._limit:
                self._start_worker()
            self._changed.notify()

    def _start_worker(self) -> None:
        worker = self._kind(self._function)
        self._workers.add(worker)
        # A daemon: a function that hangs must not keep the interpreter from exiting.
        threading.Thread(target=self._serve, args=(worker,), name=self.noun, daemon=True).start()

    def _abandon(self, call: _Call) -> None:
        """Take a call that still runs from the pool, with its worker."""
        with self._changed:
            worker = call.worker
            if call.started.cancel() or worker is None or call.result.done():
                return
            self._workers.discard(worker)
            if self._calls:
                self._start_worker()
        worker.stop()

    def _next_call(self, worker: _Thread) -> _Call | None:
        """Wait for a call. Returns ``None`` if the worker is to end."""
        with self._changed:
            while worker in self._workers:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls or self._closing)
                self._idle -= 1
                if not self._calls:
                    self._workers.discard(worker)
                    return None
                call = self._calls.popleft()
                # False if its episode was cancelled while it was in the queue.
                if call.started.set_running_or_notify_cancel():
                    call.result.set_running_or_notify_cancel()
                    call.worker = worker
                    return call
        return None

    def _serve(self, worker: _Thread) -> None:
        """Run calls until the pool closes or the worker is replaced. Runs in the worker's thread."""
        while (call := self._next_call(worker)) is not None:
            call.started.set_result(None)
            try:
                call.result.set_result(worker.run(call.args))
            except Exception as error:
                # An awaitable cannot raise StopIteration.
                wrong = isinstance(error, StopIteration)
                call.result.set_exception(RuntimeError(f"the {self.noun} raised StopIteration") if wrong else error)
            except BaseException as error:
                # Such as SystemExit, which would end the event loop.
                call.result.set_exception(RuntimeError(f"the {self.noun} raised {type(error).__name__}: {error}"))
        worker.stop()


async def in_time(work: Awaitable[R], seconds: float | None, noun: str, late: Callable[[], str]) -> R:
    """Await code of a user within a time limit.

    Args:
        work: its awaitable.
        seconds: time limit; ``None`` for no limit.
        noun: the code in error messages.
        late: returns the text of the error at the time limit.

    Raises:
        TimeoutError: it took longer, or raised this itself.
        RuntimeError: it raised ``SystemExit``, which would end the event loop.
        Exception: what else it raised.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise  # of the code itself
        raise TimeoutError(late()) from None
    except SystemExit as error:
        raise RuntimeError(f"the {noun} raised SystemExit: {error}") from error


class _Call:
    """A call in the queue or in a worker."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.started: Future[None] = Future()
        self.result: Future[Any] = Future()
        self.worker: _Thread | None = None


async def _finished(call: _Call) -> None:
    """Wait for a call, which goes on if the waiting is cancelled."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    call.result.add_done_callback(tell)
    await done.wait()


async def _resolved(call: _Call) -> Any:
    """Return the result of a call, which may be awaitable: of a plain function that returns a coroutine."""
    value = await asyncio.wrap_future(call.result)
    return await value if inspect.isawaitable(value) else value


class _Thread:
    """Worker that runs the function in its thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def run(self, args: tuple[Any, ...]) -> Any:
        return self._function(*args)

    def stop(self) -> None:
        """A thread cannot be stopped."""


class _Process(_Thread):
    """Worker that runs the function in a separate process, started by the first call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._process: Any = None
        self._stopped = False

    def run(self, args: tuple[Any, ...]) -> Any:
        if self._process is None:
            self._start()
        try:
            self._connection.send(args)
            done, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code, self._process = self._process.exitcode, None
            raise RuntimeError(
                f"the process of a call ended with exit code {code}; a script that uses processes protects its main code by "
                '`if __name__ == "__main__"`'
            ) from None
        if not done:
            text, where = value
            raise RuntimeError(text) from RemoteTraceback(where)
        return value

    def _start(self) -> None:
        # Spawned: a fork would copy the locks of other threads, and cannot use a GPU's runtime.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve_calls, args=(theirs, self._function), daemon=True)
        with theirs:
            process.start()
        # Only one that has started can be killed, and is there for the next call.
        self._process = process
        if self._stopped:
            process.kill()

    def stop(self) -> None:
        """Kill the process, if necessary once it has started. Its call, if there is one, fails."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()


def _serve_calls(connection: Connection, function: Callable[..., Any]) -> None:
    """Answer calls until the other end closes. Runs in the process of a worker."""
    # A terminal sends Ctrl-C to all its processes: the trainer ends the run, and its calls do not fail before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            args = connection.recv()
        except (EOFError, OSError):
            return
        # As text: an exception may not be picklable.
        try:
            connection.send((True, function(*args)))
        except Exception as error:
            connection.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc().rstrip())))


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object that is called like one, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _check_picklable(name: str, function: Callable[..., Any], is_async: bool) -> None:
    """Raise a ``ValueError`` if a function cannot run in a process."""
    if is_async:
        raise ValueError(
            f"{name}.processes with {function!r}: a coroutine function runs on the event loop; leave processes out"
        )
    try:
        pickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"{name}.processes with {function!r}: it cannot be pickled ({error}). Define it at the top level of a module, or use threads"
        ) from None
