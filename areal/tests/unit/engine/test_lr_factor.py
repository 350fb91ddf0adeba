"""Learning rates of every schedule, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api import OptimizerConfig
from areal.engine.optimizer import lr_factor
from areal.tests.grid.reference import learning_rate

STEPS = 12
SCHEDULES = ("constant", "linear", "cosine", "wsd")
OPTIONS: dict[str, dict[str, Any]] = {
    "cold": {},
    "warm": {"warmup_steps": 3, "min_lr_ratio": 0.1},
    "nearly all warm-up": {"warmup_steps": STEPS - 1},
    "nothing but warm-up": {"warmup_steps": STEPS + 2},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_lr_factor_equals_reference(schedule: Any, options: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=1.0, lr_scheduler=schedule, decay_ratio=0.5, **options)
    reference = learning_rate(config, STEPS)
    actual = [lr_factor(step, config, STEPS) for step in range(STEPS + 4)]
    assert actual == pytest.approx([reference(step) for step in range(STEPS + 4)], abs=1e-12)
    assert all(0 <= factor <= 1 for factor in actual)


def test_lr_factor_of_linear_schedule() -> None:
    config = OptimizerConfig(lr_scheduler="linear", warmup_steps=2, min_lr_ratio=0.2)
    result = [lr_factor(step, config, 10) for step in range(12)]
    assert result == pytest.approx([0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2])
