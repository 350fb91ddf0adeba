"""Time limits of an update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateTimes:
    """Time limits of an update, in seconds: of each step, and for interrupted requests to return."""

    step: float
    drain: float
