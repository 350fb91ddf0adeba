"""Calls of several engines that must run at the same time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from areal.api import FinetuneSpec, LoRAConfig, TrainEngine
from areal.dispatch import Executor, WorkerGroup
from areal.engine.registry import create_engine
from areal.tests.dist.trainer.ppo_runs import CRITIC, OPTIMIZER, PLAN
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import config
from areal.trainer.estimators import CriticBased
from areal.trainer.losses import ppo_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer

CHANGES: dict[str, dict[str, Any]] = {
    "policy": {},
    "reference": {"optimizer": None},
    "critic": {"value_head": True, "optimizer": CRITIC},
    "adapted": {"lora": LoRAConfig(rank=4)},
}


@contextmanager
def groups(executors: Mapping[str, Executor | None]) -> Iterator[dict[str, TrainEngine]]:
    """Start models by name: groups on these executors, or engines where there is none."""
    with ExitStack() as stack:
        made: dict[str, TrainEngine] = {}
        for name, executor in executors.items():
            settings = config("fsdp:d1", **{"path": model_dir("qwen3"), "optimizer": OPTIMIZER, **CHANGES[name]})
            engine = create_engine(settings) if executor is None else WorkerGroup(settings, executor, name=name)
            made[name] = stack.enter_context(engine)
            made[name].initialize(FinetuneSpec(total_train_steps=1000))
        yield made


def meeting(
    engine: Any, _: Any, *, folder: Path, name: str, parties: Mapping[str, Sequence[str]], seconds: float
) -> None:
    """Let each call of a verb wait until the same call of all parties has begun.

    Args:
        folder: where a call leaves a file as it begins.
        name: of this engine.
        parties: names of the engines that meet, by verb.
        seconds: to wait for the others.
    """

    def wrap(verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        numbers = itertools.count()

        def met(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            (folder / f"{verb}-{number}-{name}").touch()
            limit = time.monotonic() + seconds
            while missing := [n for n in parties[verb] if not (folder / f"{verb}-{number}-{n}").exists()]:
                if time.monotonic() > limit:
                    raise AssertionError(f"{verb} {number} of {name} ran without {missing}")
                time.sleep(0.002)
            return call(*args, **kwargs)

        return met

    for verb in parties:
        setattr(engine, verb, wrap(verb, getattr(engine, verb)))


def ppo(made: Mapping[str, TrainEngine], steps: int) -> Curve:
    """Train with all models. A policy with adapters is its own reference."""
    policy, curve = made.get("policy") or made["adapted"], Curve()
    with played(policy, PLAN) as rollout:
        trainer = PPOTrainer(
            policy,
            ppo_objective(),
            rollout.runner,
            rollout.sync,
            estimator=CriticBased(kl_coef=0.02),
            reference=made.get("reference", policy),
            critic=Critic(made["critic"], value_objective()),
            tracker=curve,
        )
        trainer.train(steps)
    return curve


def check_overlap(executors: Mapping[str, Executor], folder: Path, steps: int = 2, seconds: float = 6.0) -> None:
    """Train with models that meet in each forward and each update, and compare the curve with engines that run one after the other."""
    forward = [name for name in executors if name != "adapted"]
    with groups(dict.fromkeys(executors)) as made:
        expected = ppo(made, steps)
    with groups(executors) as made:
        for name, group in made.items():
            # A reference has no optimizer, and a policy with adapters waits for itself.
            parties = {"forward_batch": forward, "train_batch": [n for n in executors if n != "reference"]}
            chosen = {verb: names for verb, names in parties.items() if name in names and len(names) > 1}
            group.run(partial(meeting, folder=folder, name=name, parties=chosen, seconds=seconds))
        actual = ppo(made, steps)
    assert len(actual.steps) == steps
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "rollout/reward"):
        assert actual[name] == expected[name], name
