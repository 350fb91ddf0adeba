"""GRPO under torchrun, with a checkpoint after each step, and a line of JSON for each step.

    torchrun --standalone --nproc-per-node 2 -m areal.tests.dist.trainer.grpo_program MODEL FOLDER
    torchrun ... -m areal.tests.dist.trainer.grpo_program MODEL FOLDER STEP

With ``STEP``, a rank of this node hangs in that step, after it has written the file ``stalled``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from areal.api import FinetuneSpec, OptimizerConfig, TrainEngine
from areal.engine.registry import create_engine
from areal.tests.harness.rl import played
from areal.tests.harness.tiny import config
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.grpo import grpo_trainer
from areal.trainer.rollout.plan import Plan

PLAN = Plan(groups=6, group_size=4, seed=11)
OPTIMIZER = OptimizerConfig(lr=8e-3, gradient_clipping=1.0, eps=1e-6)
STEPS = 4

COMPARED = ("rollout/reward", "rollout/tokens", "actor/loss", "actor/grad_norm")
"""Numbers that depend neither on the clock nor on the rounding of the rollout."""


def stall(engine: TrainEngine, flag: Path) -> None:
    """Let the next training forward of this process wait without end, after it has written a file."""
    kind: Any = next(type(m) for m in engine._components.model.modules() if type(m).__name__.endswith("MLP"))
    right = kind.__call__

    def forward(self: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            flag.touch()
            time.sleep(600)
        return right(self, *args)

    kind.__call__ = forward


def main(model: str, folder: Path, stall_in: int = 0) -> None:
    """Train until all steps are taken, from the newest checkpoint in the folder."""
    engine = create_engine(config(f"fsdp:d{os.environ['WORLD_SIZE']}", path=model, optimizer=OPTIMIZER))
    engine.initialize(FinetuneSpec(total_train_steps=1000))
    with engine, played(engine, PLAN) as rollout, open(folder / "curve", "a") as file:
        kept = Checkpoints(folder / "checkpoints", every=1)
        trainer = grpo_trainer(engine, rollout.runner, rollout.sync, checkpoints=kept)
        trainer.resume()

        def after_step(scalars: Mapping[str, float]) -> None:
            if os.environ["RANK"] == "0":
                print(json.dumps([trainer.step, [scalars[name] for name in COMPARED]]), file=file, flush=True)
            if trainer.step == stall_in - 1 and os.environ["LOCAL_RANK"] == "0":
                stall(engine, folder / "stalled")

        trainer.train(STEPS, after_step=after_step)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
