"""Trainers in the driver, engines in two processes: the curves of the golden files, and runs that change the launcher."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal.api import FinetuneSpec, LoRAConfig, TrainEngine
from areal.dispatch import WorkerGroup
from areal.dispatch.ray import RayWorkers
from areal.engine.registry import create_engine
from areal.tests.dist.dispatch.test_overlap import check_overlap
from areal.tests.dist.trainer.test_ppo import CRITIC, GOLDEN, OPTIMIZER, PLAN, STEPS, run
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import config
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.estimators import CriticBased
from areal.trainer.losses import ppo_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer, Updates

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(580)]


@contextmanager
def groups(workers: RayWorkers | None, **backends: str) -> Iterator[dict[str, TrainEngine]]:
    """Start engines by name: ``critic`` has a value head, ``reference`` no optimizer. Without workers they run in this process."""
    changes: dict[str, dict[str, Any]] = {
        "critic": {"value_head": True, "optimizer": CRITIC},
        "reference": {"optimizer": None},
        "adapted": {"lora": LoRAConfig(rank=4)},
    }
    with ExitStack() as stack:
        made: dict[str, TrainEngine] = {}
        for name, backend in backends.items():
            settings = config(backend, **{"path": model_dir("qwen3"), "optimizer": OPTIMIZER, **changes.get(name, {})})
            engine = create_engine(settings) if workers is None else WorkerGroup(settings, workers, name=name)
            made[name] = stack.enter_context(engine)
            made[name].initialize(FinetuneSpec(total_train_steps=1000))
        yield made


@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:t2"])
def test_grpo_has_the_golden_curve(pair: RayWorkers, backend: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    with groups(pair, policy=backend, reference=backend) as made:
        curve, _ = run(made["policy"], PLAN, STEPS, reference=made["reference"], updates=Updates(minibatches=2))
    errors = {
        name: max(abs(a - b) / max(abs(b), 0.05) for a, b in zip(curve[name], expected, strict=True))
        for name, expected in golden.items()
    }
    assert max(errors.values()) < 2e-3, errors


def ppo(made: dict[str, TrainEngine], steps: int, checkpoints: Checkpoints | None = None) -> Curve:
    curve = Curve()
    with played(made["policy"], PLAN) as rollout:
        trainer = PPOTrainer(
            made["policy"],
            ppo_objective(),
            rollout.runner,
            rollout.sync,
            estimator=CriticBased(),
            critic=Critic(made["critic"], value_objective()),
            tracker=curve,
            checkpoints=checkpoints,
        )
        trainer.resume()
        trainer.train(steps)
    return curve


def numbers(curve: Curve) -> list[dict[str, float]]:
    """Return the numbers of each step that depend neither on the clock nor on the rounding of the rollout."""
    names = ("rollout/reward", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")
    return [{name: step[name] for name in names} for step in curve.steps]


def test_policy_and_critic_on_different_data_parallel_layouts(pair: RayWorkers) -> None:
    """Each engine has one data-parallel shard for the driver."""
    with groups(None, policy="fsdp:d1", critic="fsdp:d1") as made:
        expected = numbers(ppo(made, 3))
    with groups(pair, policy="fsdp:d2", critic="fsdp:c2") as made:
        actual = numbers(ppo(made, 3))
    for a, b in zip(actual, expected, strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("first", ["group", "engine"])
def test_run_goes_on_with_another_launcher(pair: RayWorkers, first: str, tmp_path: Path) -> None:
    """A run saved by a group resumes on an engine alone, and the other way round."""
    layouts = {"group": (pair, "fsdp:d2"), "engine": (None, "fsdp:d1")}
    second = "engine" if first == "group" else "group"
    with groups(None, policy="fsdp:d1", critic="fsdp:d1") as made:
        expected = numbers(ppo(made, 4))
    actual: list[dict[str, float]] = []
    for launcher, steps in ((first, 2), (second, 4)):
        workers, backend = layouts[launcher]
        with groups(workers, policy=backend, critic=backend) as made:
            actual += numbers(ppo(made, steps, Checkpoints(tmp_path, every=1)))
    assert len(actual) == 4
    for a, b in zip(actual, expected, strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-4)


def test_models_in_processes_of_their_own_score_and_train_together(cluster: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        executors = {
            name: stack.enter_context(RayWorkers(1, environment={"OMP_NUM_THREADS": "1"}))
            for name in ("policy", "reference", "critic")
        }
        check_overlap(executors, tmp_path, seconds=60.0)


def test_adapters_learn_with_their_base_model_as_reference(pair: RayWorkers) -> None:
    with groups(None, adapted="fsdp:d1") as made:
        expected, _ = run(made["adapted"], PLAN, 3, reference=made["adapted"])
    with groups(pair, adapted="fsdp:d2") as made:
        actual, _ = run(made["adapted"], PLAN, 3, reference=made["adapted"])
    for name in ("rollout/reward", "actor/loss", "actor/grad_norm"):
        assert actual[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-4)
