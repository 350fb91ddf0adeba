"""A picture of a run's numbers, refreshed while the run goes on. Needs matplotlib."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from areal.recipes.record.replaced_file import replaced

PANELS = {
    "reward": ("rollout/reward", "eval/reward"),
    "pass": ("eval/pass@1", "eval/pass@4", "eval/pass@16"),
    "loss": ("train/loss", "eval/loss"),
    "accuracy": ("train/preference/accuracy", "eval/preference/accuracy"),
    "tokens of an answer": ("rollout/tokens",),
    "entropy (nats per token)": ("actor/policy/entropy",),
    "gradient norm": ("train/grad_norm", "actor/grad_norm"),
    "log-prob error of the rollout (nats)": ("rollout/logprob_error", "rollout/logprob_error_without_replay"),
    "KL from the reference (nats)": ("actor/kl_ref/k3",),
}
"""Numbers of each panel, by its title. Panels without a number are left out."""
_COLUMNS = 3


class CurvesTracker:
    """A :class:`~areal.trainer.trackers.Tracker` that draws the values of all steps.

    Args:
        path: PNG file, replaced as a whole.
        title: title of the picture.
        known: values of earlier steps, of a run that is resumed.
        every_seconds: shortest time between two pictures.
    """

    def __init__(
        self,
        path: Path,
        title: str,
        known: Mapping[int, Mapping[str, float]] | None = None,
        *,
        every_seconds: float = 20.0,
    ) -> None:
        self._path, self._title, self._every = path, title, every_seconds
        self._steps = {step: dict(its) for step, its in (known or {}).items()}
        self._drawn = -math.inf

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note the values of a step, and draw if the last picture is old. Later steps, of the run before a resume, are forgotten."""
        self._steps = {each: its for each, its in self._steps.items() if each <= step}
        self._steps[step] = self._steps.get(step, {}) | dict(scalars)
        if time.monotonic() - self._drawn >= self._every:
            self._draw()

    def close(self) -> None:
        """Draw the last picture."""
        if self._steps:
            self._draw()

    def _draw(self) -> None:
        names = {name for its in self._steps.values() for name in its}
        panels = {title: [name for name in its if name in names] for title, its in PANELS.items()}
        panels = {title: its for title, its in panels.items() if its}
        if not panels:
            return
        rows = -(-len(panels) // _COLUMNS)
        figure = Figure(figsize=(4 * _COLUMNS, 2.8 * rows), layout="constrained")
        for position, (title, its) in enumerate(panels.items(), 1):
            axis = figure.add_subplot(rows, _COLUMNS, position)
            for name in its:
                points = [(step, values[name]) for step, values in sorted(self._steps.items()) if name in values]
                style = "o-" if name.startswith("eval/") else "-"
                axis.plot(*zip(*points, strict=True), style, markersize=3, linewidth=1.2, label=name)
            axis.set(title=title, xlabel="step")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
            if len(its) > 1:
                axis.legend(fontsize="small")
        figure.suptitle(self._title)
        with replaced(self._path) as draft:
            figure.savefig(draft, dpi=100)
        self._drawn = time.monotonic()
