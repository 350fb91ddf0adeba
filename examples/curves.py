"""Values of a run, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Curves:
    """A :class:`~areal.trainer.trackers.Tracker` that keeps the values of all steps.

    Attributes:
        values: name -> value of each step; NaN for steps without the name.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note the values of a step, from 1. A step that is taken again after a resume replaces itself and what came after it."""
        for name in {*self.values, *scalars}:
            curve = self.values.setdefault(name, [])
            del curve[step - 1 :]
            curve += [math.nan] * (step - 1 - len(curve))
            curve.append(scalars.get(name, math.nan))

    def close(self) -> None:
        """Do nothing: there is no file."""
