"""Where the numbers of a run go: a line on the terminal, TensorBoard, or whatever has the same two methods."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol


class Tracker(Protocol):
    """Takes scalars. An adapter for another service is these two methods."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note the numbers of one step."""

    def close(self) -> None:
        """Write what is left."""


class Lines:
    """One line a step.

    Args:
        names: of the scalars to show, in order; those that a step lacks are left out.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {scalars[name]:.4g}" for name in self._names if name in scalars)
        print(f"step {step}  {shown}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is left."""


class Trackers:
    """Several as one; on ranks that do not speak, none.

    Args:
        trackers: each gets every step.
        speaks: whether this rank logs.
    """

    def __init__(self, trackers: Sequence[Tracker], *, speaks: bool = True) -> None:
        self._trackers = tuple(trackers) if speaks else ()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
