"""A short run of every trainer, on engines of this process, of a group, or of torchrun.

``torchrun --nproc-per-node 2 -m areal.tests.dist.dispatch.trainer_runs MODEL FOLDER BACKEND ...`` writes the curves of all runs to
``FOLDER/curves.json``. It resumes the run that ``FOLDER/group`` has, and leaves one to resume in ``FOLDER/torchrun``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from areal.api import FinetuneSpec, LoRAConfig, MicroBatchSpec, OptimizerConfig, TrainEngine, TrainEngineConfig
from areal.engine.registry import create_engine
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import config, global_batch
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.estimators import CriticBased
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import ppo_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer
from areal.trainer.preference import Pair, dpo_trainer
from areal.trainer.rollout.plan import Plan
from areal.trainer.supervised import sft_trainer
from areal.trainer.updates import Updates
from areal.utils.data import sharded_loader

OPTIMIZER = OptimizerConfig(lr=8e-3, gradient_clipping=1.0, eps=1e-6)
CRITIC = OptimizerConfig(lr=1e-3, gradient_clipping=1.0, eps=1e-6)
PLAN = Plan(groups=4, group_size=3, seed=11)
STEPS = 4
SAVED = 2
"""Step after which a run with checkpoints can be resumed."""

TIMES = re.compile("^time/|/seconds|_per_second")
"""Names of numbers that depend on the clock."""

Make = Callable[..., TrainEngine]
"""Starts an engine from changes of the default configuration. ``name`` tells the engines of a run apart."""

Steps = list[dict[str, float]]
"""Numbers of each step, by name."""


@contextmanager
def engines(create: Callable[[TrainEngineConfig, str], TrainEngine], backend: str, path: str) -> Iterator[Make]:
    """Return a function that starts engines, which end together.

    Args:
        create: creates an engine, or a group, of a configuration and a name.
        backend: layout of engines that name none.
        path: of the model.
    """
    with ExitStack() as stack:

        def make(name: str, **changes: Any) -> TrainEngine:
            settings = config(**{"backend": backend, "path": path, "optimizer": OPTIMIZER, **changes})
            made = stack.enter_context(create(settings, name))
            made.initialize(FinetuneSpec(total_train_steps=1000))
            return made

        yield make


def alone(settings: TrainEngineConfig, name: str) -> TrainEngine:
    """Create an engine of this process."""
    return create_engine(settings)


# ---- runs


def grpo(make: Make) -> Curve:
    """Run GRPO, with the start of the policy as reference."""
    curve, engine, reference = Curve(), make("policy"), make("reference", optimizer=None)
    with played(engine, PLAN) as rollout:
        updates = Updates(minibatches=2)
        grpo_trainer(engine, rollout.runner, rollout.sync, tracker=curve, updates=updates, reference=reference).train(
            STEPS
        )
    return curve


def grpo_with_adapters(make: Make) -> Curve:
    """Run GRPO on adapters, with the model that they are trained on as reference."""
    curve, engine = Curve(), make("adapted", lora=LoRAConfig(rank=4))
    with played(engine, PLAN) as rollout:
        grpo_trainer(engine, rollout.runner, rollout.sync, tracker=curve, reference=engine).train(STEPS)
    return curve


def ppo(make: Make, folder: Path | None = None) -> Curve:
    """Run PPO with a critic. With a folder of checkpoints, from the newest one."""
    curve, engine = Curve(), make("policy")
    critic = make("critic", value_head=True, optimizer=CRITIC)
    with played(engine, PLAN) as rollout:
        trainer = PPOTrainer(
            engine,
            ppo_objective(),
            rollout.runner,
            rollout.sync,
            estimator=CriticBased(),
            critic=Critic(critic, value_objective()),
            tracker=curve,
            checkpoints=None if folder is None else Checkpoints(folder, every=SAVED),
        )
        trainer.resume()
        trainer.train(STEPS)
    return curve


def rest_of_ppo(make: Make, folder: Path, copy: Path) -> Curve:
    """Resume a run that was saved after step ``SAVED``, in a new folder ``copy`` without what it saved later."""
    for saved in folder.glob(f"*/step-{SAVED:06d}"):
        shutil.copytree(saved, copy / saved.relative_to(folder), dirs_exist_ok=True)
    return ppo(make, copy)


def sft(make: Make) -> Curve:
    """Run SFT."""
    curve, engine = Curve(), make("policy")
    shard = {"dp_rank": engine.dp_rank, "dp_size": engine.dp_size}
    sft_trainer(engine, sharded_loader(global_batch(), batch_size=3, **shard), tracker=curve).train(STEPS)
    return curve


def dpo(make: Make) -> Curve:
    """Run DPO, whose pairs stay together."""
    curve, together = Curve(), {"mb_spec": MicroBatchSpec(granularity=2)}
    engine, reference = make("policy", **together), make("reference", optimizer=None, **together)
    answers = [sample["input_ids"].tolist() for sample in global_batch() if len(sample["input_ids"]) > 2]
    pairs = [Pair(a[:2], a[2:], b[2:]) for a, b in pairwise(answers)]
    shard = {"dp_rank": engine.dp_rank, "dp_size": engine.dp_size}
    dpo_trainer(engine, reference, sharded_loader(pairs, batch_size=2, **shard), tracker=curve).train(STEPS)
    return curve


RUNS: dict[str, Callable[[Make], Curve]] = {run.__name__: run for run in (grpo, grpo_with_adapters, ppo, sft, dpo)}


# ---- under torchrun


def under_torchrun(path: str, folder: Path, backends: list[str]) -> None:
    """Run everything on the ranks of torchrun, on each layout."""
    curves: dict[str, dict[str, Steps]] = {}
    for backend in backends:
        curves[backend] = {}

        def noted(name: str, run: Callable[[Make], Curve], backend: str = backend) -> None:
            with engines(alone, backend, path) as make:
                curves[backend][name] = run(make).steps

        for name, run in RUNS.items():
            noted(name, partial(run, folder=folder / "torchrun" / backend) if run is ppo else run)
        noted("rest", partial(rest_of_ppo, folder=folder / "group" / backend, copy=folder / "rest" / backend))
    if os.environ["RANK"] == "0":
        (folder / "curves.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    under_torchrun(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    dist.destroy_process_group()
