"""Monitoring of a run: the scalars of a step, wall times, and a profile of one step."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from areal.api import Metric, Reduction, StepOutput, TrainEngine

PROFILED_STEP = 2
"""Number of the profiled step, from 1. The first step allocates memory and selects kernels."""


_REDUCE: dict[Reduction, Callable[[list[float]], float]] = {"mean": fmean, "sum": sum, "min": min, "max": max}


# ---- scalars


def step_scalars(prefix: str, step: StepOutput) -> dict[str, float]:
    """Return the numbers of a step as :func:`step_metrics` does, without their reductions."""
    return {name: float(metric.value) for name, metric in step_metrics(prefix, step).items()}


def step_metrics(prefix: str, step: StepOutput) -> dict[str, Metric]:
    """Return the numbers of a step, with names ``<prefix>/...`` and the reduction of each over steps.

    These are loss, tokens, micro-batches, seconds (also per phase, ``seconds/...``) and the loss's metrics; with an optimizer step
    gradient norm and learning rate; with several loss terms ``term/...``.
    """
    amounts: dict[str, float] = {"n_tokens": step.n_tokens, "n_mbs": step.n_mbs, "seconds": step.seconds}
    amounts |= {f"seconds/{phase}": seconds for phase, seconds in step.timings.items()}
    means = {"loss": step.loss}
    # Only a call with an optimizer step has these.
    if step.grad_norm is not None and step.lr is not None:
        means |= {"grad_norm": step.grad_norm, "lr": step.lr, "updated": float(bool(step.update_successful))}
    # The only term of a plain loss is the loss itself.
    if len(step.terms) > 1:
        means |= {f"term/{name}": value for name, value in step.terms.items()}
    metrics = {name: Metric(value) for name, value in means.items()}
    metrics |= {name: Metric(value, reduce="sum") for name, value in amounts.items()}
    metrics |= {name: Metric(value, reduce=step.reductions[name]) for name, value in step.metrics.items()}
    return {f"{prefix}/{name}": metric for name, metric in metrics.items()}


def reduce_metrics(steps: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Return one number per name from the steps that have it: the mean, sum, minimum or maximum, as its metric says."""
    values: dict[str, list[float]] = defaultdict(list)
    reductions: dict[str, Reduction] = {}
    for step in steps:
        for name, metric in step.items():
            values[name].append(float(metric.value))
            reductions[name] = metric.reduce
    return {name: _REDUCE[reductions[name]](each) for name, each in values.items()}


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

    def step(self, engine: TrainEngine) -> contextlib.AbstractContextManager[object]:
        """Return a context for the engine calls of one step. Enter one per step."""
        self._steps += 1
        if self._folder is None or self._steps != PROFILED_STEP:
            return contextlib.nullcontext()
        return engine.profile(self._folder)
