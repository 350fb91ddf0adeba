"""A run of GRPO with evaluations, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal.recipes import GRPORun, grpo
from areal.tests.harness.recipes.recipe_data import SETTINGS, recipe_model, reward, rows
from areal.tests.harness.world import cached
from areal.trainer.trackers import read_metrics
from areal.utils.distributed import TORCHRUN_VARIABLES

REWARDS = ("rollout/reward", "eval/reward")
SMALL: dict[str, Any] = {
    **SETTINGS,
    "steps": 3,
    "groups": 4,
    "group_size": 4,
    "max_new_tokens": 5,
    "save_model": False,
    "logged_groups": 1,
}


def curve(output: Path, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Return numbers of all steps of a run."""
    metrics = read_metrics(output / "metrics.jsonl")
    return {name: [its[name] for its in metrics.values() if name in its] for name in names}


def evaluated_run(backend: str, model: str, output: Path, **changes: Any) -> GRPORun:
    """Return a run with an evaluation after every second step."""
    return grpo(
        model,
        rows(24),
        reward,
        evaluation=rows(6, 1),
        backend=backend,
        output=output,
        eval_samples=2,
        eval_every=2,
        **SMALL,
        **changes,
    )


def curve_of_one_process() -> dict[str, list[float]]:
    """Return rewards of :func:`evaluated_run` on one process, which the first test that needs them computes."""

    def make() -> dict[str, list[float]]:
        environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", __name__, recipe_model(), folder]
            subprocess.run(command, env=environment, check=True, timeout=100)
            return curve(Path(folder), REWARDS)

    return cached("recipe-curve", "fsdp:d1", make)


if __name__ == "__main__":
    evaluated_run("fsdp:d1", sys.argv[1], Path(sys.argv[2])).train()
