"""A line per step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


class ConsoleTracker:
    """Print one line per step to stderr.

    Args:
        names: scalars to print, in this order. Scalars that a step lacks are left out.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print the selected scalars of one step."""
        printed = "  ".join(f"{name} {scalars[name]:.4g}" for name in self._names if name in scalars)
        print(f"step {step}  {printed}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing: every line is flushed."""
