"""The first steps of a run again, also on another layout: the same numbers, or where they differ."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areal.recipes.config import RunConfig, merged
from areal.recipes.record.run_record import SETTINGS, STARTS
from areal.recipes.record.trackers import METRICS
from areal.recipes.run import Run
from areal.trainer.trackers import read_metrics

NUMBERS = ("train/loss", "train/grad_norm", "rollout/reward", "actor/loss", "actor/grad_norm")
"""Numbers that are compared, as far as a run has them."""


class RunStart(NamedTuple):
    """The record of a run, as far as it is needed to repeat its beginning.

    Attributes:
        recipe: name of the recipe.
        settings: settings of the repetition, which writes to ``output``.
        metrics: numbers of each step.
    """

    recipe: str
    settings: dict[str, Any]
    metrics: dict[int, dict[str, float]]


class Comparison(NamedTuple):
    """What a repetition showed.

    Attributes:
        steps: number of steps that were taken again.
        lines: a line for each number that differs by more than was allowed.
        largest: largest difference of a number: relative for numbers above 1, else absolute, as the loss of a policy is near 0.
    """

    steps: int
    lines: list[str]
    largest: float


def read_record(folder: Path, output: Path, changes: Mapping[str, Any] | None = None) -> RunStart:
    """Read the record of a run.

    Args:
        folder: directory of the run.
        output: directory of the repetition.
        changes: settings of the repetition that differ, such as ``backend``.

    Raises:
        ValueError: a file is missing; rows or reward were passed to the run, and not named; or answers were sampled while weights changed.
    """
    for name in (SETTINGS, STARTS, METRICS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: name the directory of a run")
    settings = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    recipe = json.loads((folder / STARTS).read_text(encoding="utf-8").splitlines()[0])["recipe"]
    settings = merged(settings, dict(changes or {}))
    for name in ("dataset", "reward") if recipe in ("grpo", "ppo") else ("dataset",):
        if name not in settings:
            raise ValueError(
                f"{name} was passed to the run as an object, which its record does not have: repeat its script"
            )
    if settings.get("max_staleness"):
        raise ValueError(
            f"max_staleness = {settings['max_staleness']}: which weights begin an answer depends on speed; only runs with 0 can be repeated"
        )
    quiet = {"output": str(output), "resume": False, "trackers": ["jsonl"], "wandb": {}, "mlflow": {}}
    quiet |= {"save_model": False, "checkpoint_every": 0, "keep_best": False, "max_losses": 0}
    # It only trains. The rows for evaluation stay, as the others depend on them.
    quiet |= {"eval_every": None, "patience": None, "profile": None}
    logged = {"logged_groups": 0} if "logged_groups" in settings else {}
    return RunStart(recipe, settings | quiet | logged, read_metrics(folder / METRICS))


def compare(recorded: RunStart, run: Run[RunConfig], steps: int, tolerance: float) -> Comparison | None:
    """Take the first steps of a run, and compare their numbers with the recorded ones. Collective.

    Args:
        recorded: record to compare with.
        run: made with its settings. It is closed.
        steps: maximum number of steps.
        tolerance: largest difference that is allowed, as in :class:`Comparison`; 0 compares to the bit.

    Returns:
        The comparison, on the rank that speaks; ``None`` on others.
    """
    known = {step: recorded.metrics[step] for step in range(1, steps + 1) if step in recorded.metrics}
    with run.build():
        run.trainer.train(max(known, default=0))
        if not run.speaks:
            return None
        again = read_metrics(run.config.output / METRICS)
    # The record does not have a function that was passed, and distillation runs without one.
    unnamed = recorded.recipe == "distill" and recorded.settings.get("reward") is None
    names = [name for name in NUMBERS if not (unnamed and name == "rollout/reward")]
    lines, largest = [], 0.0
    for step, numbers in known.items():
        for name in (name for name in names if name in numbers):
            was, now = numbers[name], again[step].get(name, math.nan)
            difference = abs(was - now) / max(1.0, abs(was))
            largest = max(largest, difference)
            # Also a difference that is no number.
            if not difference <= tolerance:
                lines.append(f"step {step}: {name} was {was!r}, and is {now!r}")
    return Comparison(len(known), lines, largest)
