"""A run that resumes in several layouts of the FSDP engine, one after the other."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from areal.api import SaveLoadMeta
from areal.tests.harness.tiny import global_batch, local_batch, loss, same_bits, started, weights_of


def assert_resumes(path: str, chain: list[str], folder: Path, bound: float) -> None:
    """Load in each layout what the previous one saved, bit for bit, take a step and save; also resume each in plain data parallelism.

    Args:
        path: str. Model directory.
        chain: list of layouts without the engine, with ``/`` and the name of a schedule if they have one.
        folder: directory of the checkpoints.
        bound: float. Largest difference after a step in two layouts, relative to the step.
    """
    before = None
    for number, name in enumerate(chain):
        letters, _, schedule = name.partition("/")
        here = SaveLoadMeta(folder / str(number), weight_format="dcp")
        with started(f"fsdp:{letters}", path=path, fsdp={"pipeline_schedule": schedule or None}) as engine:
            if before is not None:
                engine.load(SaveLoadMeta(folder / str(number - 1), weight_format="dcp"))
                assert same_bits(weights_of(engine), before), name
            engine.train_batch(local_batch(engine, global_batch(number)), loss)
            engine.save(here)
            before = weights_of(engine)
            engine.train_batch(local_batch(engine, global_batch(number + 1)), loss)
            went_on = weights_of(engine)
        with started(f"fsdp:d{dist.get_world_size()}", path=path) as engine:
            engine.load(here)
            assert same_bits(weights_of(engine), before), name
            engine.train_batch(local_batch(engine, global_batch(number + 1)), loss)
            for key, weight in weights_of(engine).items():
                change = (went_on[key] - before[key]).norm()
                assert (weight - went_on[key]).norm() <= bound * change + 1e-6, (name, key)
