"""A stream of tensors on all ranks, as the driver reads it."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from areal.api import NamedTensor
from areal.dispatch.shared_devices.turns import Turn

logger = logging.getLogger(__name__)


class Cleaner:
    """Runs functions in a thread, in the order in which they came: the garbage collector may run where the locks of a call are held."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it is not running. A finalizer must not do it."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="areal-cleaner", daemon=True)
                self._thread.start()

    def later(self, function: Callable[[], object]) -> None:
        """Run a function in the thread. May be called by a finalizer: it takes no lock of Python code."""
        self._work.put(function)

    def _run(self) -> None:
        while True:
            function = self._work.get()
            try:
                function()
            except Exception as error:
                logger.debug("what an object has left could not be released: %s", error)


CLEANER = Cleaner()
"""The cleaner of this process."""


class _Lease:
    """What an open stream holds: objects on the ranks, and a use of shared devices.

    Args:
        drop: drops the objects.
    """

    def __init__(self, drop: Callable[[], object]) -> None:
        self._drop: Callable[[], object] | None = drop
        self.turn: Turn | None = None

    def release(self, *, read_to_the_end: bool = False) -> None:
        """Drop the objects, unless the ranks have dropped them at the end of the stream, and end the use. May be called twice."""
        drop, self._drop = self._drop, None
        turn, self.turn = self.turn, None
        try:
            if drop is not None and not read_to_the_end:
                drop()
        finally:
            if turn is not None:
                turn.end()


class RemoteStream(Iterator[NamedTensor]):
    """Iterates over the tensors of rank 0, which come in chunks. Left early, the stream is closed on all ranks.

    Args:
        begin: begins the use of the stream, before the first chunk; returns ``None`` without shared devices.
        read: returns the next chunk, and True if it is the last one.
        drop: closes the stream on all ranks.
        in_driver: ``drop`` sends nothing, so that a finalizer may call it. Otherwise another thread does, where no lock of a call is held.
    """

    def __init__(
        self,
        begin: Callable[[], Turn | None],
        read: Callable[[], tuple[list[Any], bool]],
        drop: Callable[[], object],
        *,
        in_driver: bool,
    ) -> None:
        self._begin, self._read = begin, read
        self._lease = _Lease(drop)
        self._chunk: Iterator[NamedTensor] = iter(())
        self._begun = self._ended = False
        release: Callable[[], object] = self._lease.release
        if not in_driver:
            CLEANER.start()
            release = partial(CLEANER.later, release)
        weakref.finalize(self, release).atexit = False

    def __next__(self) -> NamedTensor:
        # The use begins with the first chunk: a stream that is never read must not hold it.
        if not self._begun:
            self._begun, self._lease.turn = True, self._begin()
        while (tensor := next(self._chunk, None)) is None:
            if self._ended:
                self._lease.release(read_to_the_end=True)
                raise StopIteration
            try:
                tensors, self._ended = self._read()
            except BaseException:
                with suppress(Exception):
                    self.close()
                raise
            self._chunk = iter(tensors)
        return tensor

    def close(self) -> None:
        """Close the stream on all ranks."""
        self._ended, self._chunk = True, iter(())
        self._lease.release()
