"""Monitoring of a run: trackers of scalars, the scalars of a step, wall times, and a profile of one step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from areal.api import StepOutput, TrainEngine

PROFILED_STEP = 2
"""Number of the profiled step, from 1. The first step allocates memory and selects kernels."""


# ---- trackers


class Tracker(Protocol):
    """Destination of scalars. An adapter for another service implements these two methods."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of one step."""

    def close(self) -> None:
        """Write remaining scalars and release resources."""


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


class Trackers:
    """Several trackers as one.

    Args:
        trackers: each gets every step. Pass an empty list on all ranks but one.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of one step with each tracker."""
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def close(self) -> None:
        """Close each tracker."""
        for tracker in self._trackers:
            tracker.close()


# ---- scalars


def step_scalars(prefix: str, step: StepOutput) -> dict[str, float]:
    """Return the numbers of a step, with names ``<prefix>/...``.

    These are loss, tokens, micro-batches, seconds (also per phase, ``seconds/...``) and the loss's metrics; with an optimizer step
    gradient norm and learning rate; with several loss terms ``term/...``.
    """
    scalars: dict[str, float] = {
        "loss": step.loss,
        "n_tokens": step.n_tokens,
        "n_mbs": step.n_mbs,
        "seconds": step.seconds,
    }
    # Only a call with an optimizer step has these.
    if step.grad_norm is not None and step.lr is not None:
        scalars |= {"grad_norm": step.grad_norm, "lr": step.lr, "updated": float(bool(step.update_successful))}
    scalars |= {f"seconds/{phase}": seconds for phase, seconds in step.timings.items()}
    # The only term of a plain loss is the loss itself.
    if len(step.terms) > 1:
        scalars |= {f"term/{name}": value for name, value in step.terms.items()}
    return {f"{prefix}/{name}": value for name, value in (scalars | step.metrics).items()}


def mean_scalars(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the steps that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            values[name].append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


# ---- times and profile


class StepTimer:
    """Wall time of the phases of a step on this rank. The phases add up to the step."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End the phase ``name``, which began with the end of the previous one."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def scalars(self) -> dict[str, float]:
        """Return seconds: ``time/<name>`` of each phase and ``time/step`` of all."""
        return {f"time/{name}": seconds for name, seconds in (self._laps | {"step": self._last - self._begin}).items()}


class StepProfile:
    """Profile step :data:`PROFILED_STEP` of a run, and no other.

    Args:
        folder: output directory of :meth:`areal.api.engine.TrainEngine.profile`. ``None`` disables profiling.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = folder
        self._steps = 0

    def step(self, engine: TrainEngine) -> contextlib.AbstractContextManager[None]:
        """Return a context for the engine calls of one step. Enter one per step."""
        self._steps += 1
        if self._folder is None or self._steps != PROFILED_STEP:
            return contextlib.nullcontext()
        return engine.profile(self._folder)
