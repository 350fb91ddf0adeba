"""Runs of the PPO trainer, and the curve that they must have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.api import OptimizerConfig, TrainEngine
from areal.tests.harness.rl import Curve, played
from areal.trainer.grpo import grpo_trainer
from areal.trainer.ppo import PPOTrainer
from areal.trainer.rollout.plan import Plan

GOLDEN = Path(__file__).parents[2] / "golden" / "grpo_curve.json"


OPTIMIZER = OptimizerConfig(lr=8e-3, gradient_clipping=1.0, eps=1e-6)


CRITIC = OptimizerConfig(lr=1e-3, gradient_clipping=1.0, eps=1e-6)


PLAN = Plan(groups=6, group_size=4, seed=11)


STEPS = 20


def run(engine: TrainEngine, plan: Plan, steps: int, **options: Any) -> tuple[Curve, PPOTrainer]:
    curve = Curve()
    with played(engine, plan) as rollout:
        trainer = grpo_trainer(engine, rollout.runner, rollout.sync, tracker=curve, **options)
        trainer.resume()
        trainer.train(steps)
    return curve, trainer
