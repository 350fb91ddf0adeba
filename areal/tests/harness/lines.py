"""Cost of Python code as the number of its lines that run: the same on a machine of any speed and load."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import areal


@contextmanager
def counted_lines(package: str = "") -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many lines of a package this thread and all new ones have run.

    A line counts once for each pass of a loop or comprehension over it.

    Args:
        package: folder within ``areal``, such as ``"dispatch"``.
    """
    lines, folder = count(), str(Path(areal.__file__).parent / package)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            next(lines)
        return trace

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield lambda: next(lines)
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of ``areal`` a call runs."""
    with counted_lines() as lines:
        before = lines()
        work()
        return lines() - before - 1
