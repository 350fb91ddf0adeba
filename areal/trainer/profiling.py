"""A profile of one early step of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from areal.api import TrainEngine

PROFILED = 2
"""Number of the step, from 1: in the first, memory is allocated and kernels are chosen."""


class StepProfile:
    """Profiles the second step of a run, and no other.

    Args:
        folder: where :meth:`areal.api.engine.TrainEngine.profile` writes; ``None`` profiles nothing.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = folder
        self._steps = 0

    def step(self, engine: TrainEngine) -> contextlib.AbstractContextManager[None]:
        """To be around what the engine does in each step."""
        self._steps += 1
        if self._folder is None or self._steps != PROFILED:
            return contextlib.nullcontext()
        return engine.profile(self._folder)
