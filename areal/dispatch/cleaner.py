"""A thread for what objects leave behind: the garbage collector may run anywhere, also where the locks of a call are held."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Cleaner:
    """Runs functions in a thread, in the order in which they came."""

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
