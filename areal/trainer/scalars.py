"""The numbers of a step, by name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from areal.api import StepOutput


def scalars_of(prefix: str, step: StepOutput) -> dict[str, float]:
    """What a step reports, each name behind ``prefix/``: loss, grad norm, learning rate, tokens, seconds (and ``seconds/...`` of each
    phase), metrics; the terms of a loss that has several.
    """
    found: dict[str, float] = {
        "loss": step.loss,
        "n_tokens": step.n_tokens,
        "n_mbs": step.n_mbs,
        "seconds": step.seconds,
    }
    if step.grad_norm is not None and step.lr is not None:
        found |= {"grad_norm": step.grad_norm, "lr": step.lr, "updated": float(bool(step.update_successful))}
    found |= {f"seconds/{phase}": seconds for phase, seconds in step.timings.items()}
    if len(step.terms) > 1:
        found |= {f"term/{name}": value for name, value in step.terms.items()}
    return {f"{prefix}/{name}": value for name, value in (found | step.metrics).items()}


def mean_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the steps that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            found[name].append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


class StepTimer:
    """Where the seconds of this rank go."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What was since the last lap has this name."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def scalars(self) -> dict[str, float]:
        """``time/...`` of each lap, and ``time/step`` of all."""
        return {f"time/{name}": seconds for name, seconds in (self._laps | {"step": self._last - self._begin}).items()}
