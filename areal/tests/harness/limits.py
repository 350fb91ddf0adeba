"""Time limits of tests: one for each promise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROMPTLY = 20.0
"""Seconds within which a fault must be raised on every rank, wide enough for a machine whose cores are busy."""

COMPILING = 60.0
"""Seconds within which a fault must be raised by a call that compiles a program first."""

PATIENTLY = 60.0
"""Seconds for which a test waits for a state that it needs, such as a number of requests."""


@contextmanager
def promptly(limit: float = PROMPTLY) -> Iterator[None]:
    """Fail if the block takes ``limit`` seconds or longer. A hang of the block must last longer."""
    begin = time.monotonic()
    yield
    seconds = time.monotonic() - begin
    assert seconds < limit, f"took {seconds:.1f} s, the limit is {limit:g} s"


def wait_until(condition: Callable[[], bool], what: str = "the condition", seconds: float = PATIENTLY) -> None:
    """Wait for a condition, and fail after ``seconds`` without it.

    Args:
        condition: called every few milliseconds.
        what: the condition in words, for the message.
        seconds: limit. Pass more for work that takes long, such as the start of a process.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not true after {seconds:g} s: {what}"
        time.sleep(0.005)
