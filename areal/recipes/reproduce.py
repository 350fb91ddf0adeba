"""The first steps of a run again: the same numbers to the bit, or where they differ."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from areal.recipes.config import RunConfig
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


def read_record(folder: Path, output: Path) -> RunStart:
    """Read the record of a run.

    Args:
        folder: directory of the run.
        output: directory of the repetition.

    Raises:
        ValueError: a file is missing; rows or reward were passed to the run, and not named; or answers were sampled while weights changed.
    """
    for name in (SETTINGS, STARTS, METRICS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: name the directory of a run")
    settings = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    recipe = json.loads((folder / STARTS).read_text(encoding="utf-8").splitlines()[0])["recipe"]
    for name in ("dataset", "reward") if recipe in ("grpo", "ppo") else ("dataset",):
        if name not in settings:
            raise ValueError(
                f"{name} was passed to the run as an object, which its record does not have: repeat its script"
            )
    if settings.get("max_staleness"):
        raise ValueError(
            f"max_staleness = {settings['max_staleness']}: which weights begin an answer depends on speed; only runs with 0 can be repeated"
        )
    changes = {"output": str(output), "resume": False, "trackers": ["jsonl"], "wandb": {}, "mlflow": {}}
    quiet = {"save_model": False, "checkpoint_every": 0, "keep_best": False}
    logged = {"logged_groups": 0} if "logged_groups" in settings else {}
    return RunStart(recipe, settings | changes | quiet | logged, read_metrics(folder / METRICS))


def differences(recorded: RunStart, run: Run[RunConfig], steps: int) -> list[str] | None:
    """Take the first steps of a run, and return a line for each number that differs from the recorded one. Collective.

    Args:
        recorded: record to compare with.
        run: made with its settings. It is closed.
        steps: number of steps.

    Returns:
        The lines, on the rank that speaks; ``None`` on others.
    """
    known = {step: recorded.metrics[step] for step in range(1, steps + 1) if step in recorded.metrics}
    with run.build():
        run.trainer.train(max(known, default=0))
        if not run.speaks:
            return None
        again = read_metrics(run.config.output / METRICS)
    lines = []
    for step, numbers in known.items():
        for name in NUMBERS:
            if name in numbers and again[step].get(name) != numbers[name]:
                lines.append(f"step {step}: {name} was {numbers[name]!r}, and is {again[step].get(name)!r}")
    return lines
