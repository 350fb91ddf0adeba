"""A run of twenty steps with known losses, which every engine must reproduce.

``python -m areal.tests.harness.loss_curve`` writes the losses again. They are computed by transformers in float64, one
sequence at a time.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from areal.api import OptimizerConfig
from areal.tests.grid.cases import CASES, samples
from areal.tests.grid.losses import OBJECTIVES
from areal.tests.grid.models import model_dir
from areal.tests.grid.reference import Reference

FILE = Path(__file__).parents[1] / "golden" / "loss_curve.json"

FAMILY, STEPS = "qwen3", 20
OBJECTIVE, CASE = OBJECTIVES["nll"], CASES["ragged"]
OPTIMIZER = OptimizerConfig(
    lr=2e-3, lr_scheduler="cosine", warmup_steps=4, gradient_clipping=1.0, weight_decay=0.1, eps=1e-6
)


def batch(step: int) -> list[dict[str, Tensor]]:
    """Return the global batch of a step. Four batches repeat, so that the loss decreases."""
    return samples(CASE, seed=step % 4)


def golden() -> list[float]:
    """Return the losses in the file."""
    return json.loads(FILE.read_text())["losses"]


def compute() -> list[float]:
    """Compute the losses of the reference."""
    reference = Reference(model_dir(FAMILY))
    reference.make_optimizer(OPTIMIZER, total_steps=STEPS)
    losses = []
    for step in range(STEPS):
        losses.append(reference.step(batch(step), OBJECTIVE.loss_fn, OBJECTIVE.weight_fn).loss)
        reference.optimizer_step()
    return losses


if __name__ == "__main__":
    FILE.write_text(json.dumps({"losses": compute()}, indent=1) + "\n")
