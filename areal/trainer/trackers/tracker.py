"""Interface of trackers, and several as one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Destination of scalars. An adapter for another service implements these two methods."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record scalars of one step. A step may be logged in several calls, such as once more with its evaluation."""

    def close(self) -> None:
        """Write remaining scalars and release resources."""


class Trackers:
    """Several trackers as one. A tracker that raises does not end the run: the first error of each is logged, and it is called again.

    Args:
        trackers: each gets every step. Pass an empty list on all ranks but one.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)
        self._failed: set[int] = set()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of one step with each tracker."""
        for number, tracker in enumerate(self._trackers):
            try:
                tracker.log(step, scalars)
            except Exception as error:
                self._report(number, f"step {step} was not recorded", error)

    def close(self) -> None:
        """Close each tracker."""
        for number, tracker in enumerate(self._trackers):
            try:
                tracker.close()
            except Exception as error:
                self._report(number, "it was not closed", error)

    def _report(self, number: int, what: str, error: Exception) -> None:
        """Log the first error of a tracker."""
        if number not in self._failed:
            self._failed.add(number)
            name = type(self._trackers[number]).__name__
            logger.warning(
                "%s: %s (%s: %s); the run goes on, and further errors are not shown",
                name,
                what,
                type(error).__name__,
                error,
            )
