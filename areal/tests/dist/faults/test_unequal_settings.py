"""Ranks with other settings, and ranks that save or load other checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from areal.api import OptimizerConfig, SaveLoadMeta
from areal.tests.dist.faults.twins import raised
from areal.tests.harness.tiny import family_dir, global_batch, layout, local_batch, loss, same_bits, started, weights_of
from areal.tests.harness.world import world
from areal.trainer.checkpoints import Checkpoints


@pytest.mark.parametrize("backend", [layout(backend) for backend in ("fsdp:d2", "megatron:t2")])
def test_ranks_with_other_settings_are_told(backend: str, tmp_path: Path) -> None:
    last = world().rank == world().size - 1
    way_out = "start all ranks with the same settings"
    differing: dict[str, Any] = {"optimizer": OptimizerConfig(lr=0.01 if last else 0.02), "seed": int(last)}
    for name, value in differing.items():
        with raised(ValueError, f"TrainEngineConfig.{name}", "on rank 0", way_out), started(backend, **{name: value}):
            pass
    words = ("FinetuneSpec.total_train_steps = 100 on rank 0, and 101 on rank 1", way_out)
    with raised(ValueError, *words), started(backend, total_steps=100 + last):
        pass
    # Hosts may have the model, and room for files, in other places.
    copy = str(shutil.copytree(family_dir("qwen3"), tmp_path / f"model-{world().rank}"))
    with started(backend, path=copy, offload_dir=copy) as engine:
        assert engine.train_batch(local_batch(engine, global_batch()), loss).update_successful


@pytest.mark.parametrize("backend", [layout(backend) for backend in ("fsdp:d2", "megatron:t2", "jax:d2")])
def test_ranks_that_mean_other_checkpoints_are_told(backend: str, tmp_path: Path) -> None:
    last = world().rank == world().size - 1
    with started(backend) as engine:
        batch, checkpoints = local_batch(engine, global_batch()), Checkpoints(tmp_path, every=1, keep_last=2)
        for step in (1, 2):
            engine.train_batch(batch, loss)
            checkpoints.save({"policy": engine}, step, {})
        before = weights_of(engine)
        # One host does not see the second checkpoint yet.
        seen = mock.patch.object(Checkpoints, "steps", return_value=[1] if last else [1, 2])
        with (
            seen,
            raised(ValueError, "'step-000002' on rank 0, and 'step-000001' on rank 1", "load the same checkpoint"),
        ):
            checkpoints.resume({"policy": engine}, {})
        # One host still sees the files that the checkpoint of this name had before.
        seen_here = tmp_path / f"rank-{world().rank}" / "step-000002"
        shutil.copytree(tmp_path / "policy" / f"step-00000{2 - last}", seen_here)
        with raised(ValueError, "CRC-32 of manifest.json", "load the same checkpoint"):
            engine.load(SaveLoadMeta(seen_here, weight_format="dcp"))
        for verb in (engine.load, engine.save):
            words = ("SaveLoadMeta.weight_format = 'dcp' on rank 0, and 'hf' on rank 1", f"{verb.__name__} the same")
            with raised(ValueError, *words):
                verb(SaveLoadMeta(tmp_path / "policy" / "step-000002", weight_format="hf" if last else "dcp"))
        assert same_bits(weights_of(engine), before)
        assert checkpoints.resume({"policy": engine}, {}) == 2
