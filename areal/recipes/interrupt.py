"""Ctrl-C in a run: it ends after the step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 130
"""Exit code of a program that SIGINT ended: 128 and the number of the signal."""


class Interrupt:
    """Context in which the first SIGINT is only noted. The second one raises KeyboardInterrupt, as usual.

    Outside the main thread, where Python has no signals, the context does nothing.

    Attributes:
        noted: True once a signal arrived.
    """

    def __init__(self) -> None:
        self.noted = False
        self._earlier: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        self._restore()

    def _restore(self) -> None:
        if self._earlier is not None:
            signal.signal(signal.SIGINT, self._earlier)
            self._earlier = None
