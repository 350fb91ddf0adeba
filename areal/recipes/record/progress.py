"""What a run has reached: results of evaluations, the best one, and a line on the console."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm


class Results:
    """Results of the evaluations of a run; part of its checkpoints.

    Args:
        name: number by which evaluations are compared, such as ``eval/reward``.
        larger_is_better: direction of the comparison.

    Attributes:
        by_step: numbers of each evaluation, by the number of batches trained on.
    """

    def __init__(self, name: str, *, larger_is_better: bool) -> None:
        self.name, self._sign = name, 1.0 if larger_is_better else -1.0
        self.by_step: dict[int, dict[str, float]] = {}

    def add(self, step: int, scalars: dict[str, float]) -> bool:
        """Add an evaluation. Returns whether it is better than all before."""
        self.by_step[step] = scalars
        return self.best_step == step

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation, the first of equal ones; ``None`` before any."""
        values = {step: self._sign * its.get(self.name, math.nan) for step, its in self.by_step.items()}
        known = {step: value for step, value in values.items() if not math.isnan(value)}
        return max(known, key=lambda step: (known[step], -step)) if known else None

    @property
    def since_best(self) -> int:
        """Number of evaluations after the best one."""
        best = self.best_step
        return 0 if best is None else sum(step > best for step in self.by_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the results."""
        return {"by_step": [[step, dict(its)] for step, its in self.by_step.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the results of :meth:`state_dict`."""
        self.by_step = {step: dict(its) for step, its in state["by_step"]}


class Console:
    """A :class:`~areal.trainer.trackers.Tracker` on stderr: a bar with speed and time left on a terminal, elsewhere a line per step.

    Args:
        total: number of steps of the run.
        names: scalars that are shown, in this order, under the last part of their name.
    """

    def __init__(self, total: int, names: Sequence[str]) -> None:
        self._total, self._names = total, tuple(names)
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the scalars of one step, or of an evaluation after it."""
        new = {name.rpartition("/")[2]: f"{scalars[name]:.4g}" for name in self._names if name in scalars}
        if any(name.startswith("eval/") for name in scalars):
            results = "  ".join(f"{name} {value:.4g}" for name, value in scalars.items() if not name.endswith("_ci95"))
            self.line(f"step {step}/{self._total}  {results}")
        elif sys.stderr.isatty():
            self._shown |= new
            self._advance(step)
        else:
            shown = "  ".join(f"{name} {value}" for name, value in new.items())
            self.line(f"step {step}/{self._total}  {shown}")

    def line(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()

    def _advance(self, step: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=self._total, initial=step - 1, desc="step", dynamic_ncols=True)
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(step - self._bar.n)
