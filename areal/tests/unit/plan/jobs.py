"""Plans to ask for on a tiny model."""

from __future__ import annotations

from areal.api import OptimizerConfig
from areal.plan.hardware import Hardware
from areal.plan.layout_search import PlanJob
from areal.tests.harness.tiny import family_dir

SETTINGS = {"dtype": "bfloat16", "optimizer": OptimizerConfig(lr=1e-3, lr_scheduler="constant")}


def job(layers: int = 8, **changes: object) -> PlanJob:
    """Return a job on a tiny model."""
    fields = {"tokens_per_rank": 64, "length": 64, "memory": 2**34, "hardware": Hardware(), "settings": SETTINGS}
    return PlanJob(model=family_dir("qwen3", num_hidden_layers=layers), **{**fields, **changes})  # type: ignore[arg-type]
