"""What a loss costs: the restart of a group after a killed rank, next to a load of its checkpoint.

python -m benchmarks.recovery, with the extra ray
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from areal import FinetuneSpec, OptimizerConfig, SaveLoadMeta, TrainEngineConfig
from areal.dispatch import WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.ray import RayWorkers
from benchmarks.dispatch import loss
from benchmarks.model import Size, write_model


@dataclass(frozen=True)
class Settings:
    """Command-line options."""

    hidden: int = 1024
    """Width of the model."""
    layers: int = 8
    """Number of layers of the model."""
    vocabulary: int = 16384
    """Number of token ids."""
    rounds: int = 3
    """Number of losses per way of a restart."""


def kill_rank_1(engine: Any, _: None) -> None:
    """End the process of rank 1."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def lose_rank(group: WorkerGroup) -> None:
    """Kill a rank, and wait for the error."""
    try:
        group.run(kill_rank_1)
    except WorkerLostError:
        return
    raise RuntimeError("rank 1 is dead, and the group did not notice")


def measured(settings: Settings, folder: Path) -> None:
    """Print a line for each way to restart."""
    size = Size(settings.hidden, settings.layers, settings.vocabulary)
    write_model(folder / "model", size)
    config = TrainEngineConfig(
        path=str(folder / "model"), backend="fsdp:d2", dtype="float32", optimizer=OptimizerConfig(lr=1e-4)
    )
    meta = SaveLoadMeta(folder / "checkpoint", weight_format="dcp", with_optim=True)
    batch = [
        {"input_ids": torch.arange(32), "loss_mask": torch.ones(32), "advantages": torch.ones(32)} for _ in range(2)
    ]
    for title, layout in (("on the rank that is left", "fsdp:d1"), ("in new processes", None)):
        for number in range(settings.rounds):
            with RayWorkers(2, environment={"OMP_NUM_THREADS": "1"}) as workers, WorkerGroup(config, workers) as group:
                group.initialize(FinetuneSpec(total_train_steps=1000))
                group.train_batch(batch, loss)
                group.save(meta)
                load = seconds_of(lambda: group.load(meta))
                notice = seconds_of(lambda: lose_rank(group))
                restart = seconds_of(lambda: group.restart(layout=layout))  # noqa: B023
                print(
                    f"{title}, {number + 1}: {size.matrix_parameters / 1e6:.0f}M parameters; the loss is noticed after {notice:.1f} s, the "
                    f"restart takes {restart:.1f} s, {restart / load:.1f} times a load of {load:.1f} s",
                    flush=True,
                )


def main(settings: Settings) -> None:
    """Measure in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        measured(settings, Path(folder))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
