"""The trackers of a run, by name."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from areal.recipes.config import RunConfig
from areal.recipes.record.progress import Console
from areal.recipes.record.secrets import public_settings
from areal.trainer.trackers import JSONLTracker, Tracker, Trackers, read_metrics

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
"""File of the numbers of all steps, in the directory of a run."""


def make_trackers(config: RunConfig, steps: int, shown: tuple[str, ...]) -> Tracker:
    """Return the trackers of ``config.trackers`` as one.

    Args:
        config: settings of the run.
        steps: number of steps of the run.
        shown: numbers on the console.

    Raises:
        ValueError: a tracker's package is not installed; for ``curves``, which is a default, this is only logged.
    """
    make: dict[str, Callable[[], Tracker]] = {
        "console": lambda: Console(steps, shown),
        "jsonl": lambda: JSONLTracker(config.output / METRICS),
        "curves": lambda: _curves(config),
        "tensorboard": lambda: _tensorboard(config.output / "tensorboard"),
        "wandb": lambda: _wandb(config),
        "mlflow": lambda: _mlflow(config),
    }
    if not config.resume:
        # Of an earlier run in this directory.
        for name in (METRICS, "wandb-run-id", "mlflow-run-id"):
            (config.output / name).unlink(missing_ok=True)
        shutil.rmtree(config.output / "tensorboard", ignore_errors=True)
    made = []
    for name in config.trackers:
        try:
            made.append(make[name]())
        except ModuleNotFoundError as error:
            missing = f"trackers: {name!r} needs {error.name}, which is not installed: pip install 'areal[recipes]' {error.name}"
            if name != "curves":
                raise ValueError(missing) from None
            logger.warning(missing)
    return Trackers(made)


def _curves(config: RunConfig) -> Any:
    module = import_module("areal.recipes.record.curves")
    metrics = config.output / METRICS
    known = read_metrics(metrics) if config.resume and metrics.exists() else {}
    return module.CurvesTracker(config.output / "curves.png", f"{config.output.name}: {config.backend}", known)


def _tensorboard(folder: Path) -> Any:
    module = import_module("areal.trainer.trackers.tensorboard")
    return module.TensorBoard(folder)


def _wandb(config: RunConfig) -> Any:
    module = import_module("areal.trainer.trackers.wandb")
    return module.WandB(config.output, public_settings(config), **{"name": config.output.name, **config.wandb})


def _mlflow(config: RunConfig) -> Any:
    module = import_module("areal.trainer.trackers.mlflow")
    return module.MLflow(config.output, public_settings(config), **{"name": config.output.name, **config.mlflow})
