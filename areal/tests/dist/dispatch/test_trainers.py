"""Trainers run unchanged on a group: the same curves as on the engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal.api import FinetuneSpec, LoRAConfig, MicroBatchSpec, OptimizerConfig, TrainEngine
from areal.dispatch import WorkerGroup
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import config, global_batch
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.estimators import CriticBased
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import ppo_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer, Updates
from areal.trainer.preference import Pair, dpo_trainer
from areal.trainer.rollout.plan import Plan
from areal.trainer.supervised import sft_trainer
from areal.utils.data import sharded_loader
from areal.engine.registry import create_engine

OPTIMIZER = OptimizerConfig(lr=8e-3, gradient_clipping=1.0, eps=1e-6)
PLAN = Plan(groups=4, group_size=3, seed=11)
STEPS = 3

TIMES = re.compile("^time/|/seconds|_per_second")
"""Names of numbers that depend on the clock."""

Make = Callable[..., TrainEngine]


@contextmanager
def engines(handle: bool, backend: str = "fsdp:d1") -> Iterator[Make]:
    """Return a function that starts engines, or groups, which end together."""
    with ExitStack() as stack:

        def make(**changes: Any) -> TrainEngine:
            settings = config(backend, **{"path": model_dir("qwen3"), "optimizer": OPTIMIZER, **changes})
            made = stack.enter_context(WorkerGroup(settings) if handle else create_engine(settings))
            made.initialize(FinetuneSpec(total_train_steps=1000))
            return made

        yield make


def grpo(make: Make, folder: Path) -> Curve:
    curve, engine = Curve(), make()
    with played(engine, PLAN) as rollout:
        options = {"reference": make(optimizer=None), "updates": Updates(minibatches=2)}
        grpo_trainer(engine, rollout.runner, rollout.sync, tracker=curve, **options).train(STEPS)
    return curve


def grpo_with_adapters(make: Make, folder: Path) -> Curve:
    curve, engine = Curve(), make(lora=LoRAConfig(rank=4))
    with played(engine, PLAN) as rollout:
        grpo_trainer(engine, rollout.runner, rollout.sync, tracker=curve, reference=engine).train(STEPS)
    return curve


def ppo(make: Make, folder: Path) -> Curve:
    """With a checkpoint after each step, from which the second half continues."""
    curve = Curve()
    for steps in (2, STEPS + 1):
        engine, critic = make(), make(value_head=True)
        with played(engine, PLAN) as rollout:
            trainer = PPOTrainer(
                engine,
                ppo_objective(),
                rollout.runner,
                rollout.sync,
                estimator=CriticBased(),
                critic=Critic(critic, value_objective()),
                tracker=curve,
                checkpoints=Checkpoints(folder, every=1),
            )
            trainer.resume()
            trainer.train(steps)
    return curve


def sft(make: Make, folder: Path) -> Curve:
    curve = Curve()
    loader = sharded_loader(global_batch(), batch_size=3, dp_rank=0, dp_size=1)
    sft_trainer(make(), loader, tracker=curve).train(STEPS)
    return curve


def dpo(make: Make, folder: Path) -> Curve:
    curve = Curve()
    samples = [sample for sample in global_batch() if len(sample["input_ids"]) > 2]
    answers = [sample["input_ids"].tolist() for sample in samples]
    pairs = [Pair(a[:2], a[2:], b[2:]) for a, b in pairwise(answers)]
    whole = {"mb_spec": MicroBatchSpec(granularity=2)}
    loader = sharded_loader(pairs, batch_size=2, dp_rank=0, dp_size=1)
    dpo_trainer(make(**whole), make(optimizer=None, **whole), loader, tracker=curve).train(STEPS)
    return curve


@pytest.mark.world(1)
@pytest.mark.parametrize("run", [grpo, sft, *(pytest.param(run, marks=pytest.mark.thorough) for run in (grpo_with_adapters, ppo, dpo))])
def test_trainer_on_a_group_has_the_curve_of_the_engine(run: Callable[[Make, Path], Curve], tmp_path: Path) -> None:
    curves = []
    for handle in (False, True):
        with engines(handle) as make:
            curves.append(run(make, tmp_path / str(handle)))
    engine, group = curves
    assert len(group.steps) >= STEPS
    for expected, actual in zip(engine.steps, group.steps, strict=True):
        assert expected.keys() == actual.keys()
        # Rollouts round by which requests they compute together.
        measured = {name: value for name, value in expected.items() if not TIMES.search(name)}
        assert {name: actual[name] for name in measured} == pytest.approx(measured, rel=1e-5, abs=1e-6)
