"""AdamW with bfloat16 moments in an engine: replicas stay equal, and a run resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from areal.api import SaveLoadMeta, TrainEngine
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import global_batch, local_batch, loss, same_bits, started, weights_of
from areal.utils.offload import optimizer_tensors


def train(engine: TrainEngine, steps: range) -> None:
    for step in steps:
        assert engine.train_batch(local_batch(engine, global_batch(step)), loss).update_successful


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("fsdp:d1", marks=pytest.mark.world(1)),
        pytest.param("fsdp:d2", marks=[pytest.mark.world(2)]),
        pytest.param("fsdp:r2", marks=pytest.mark.world(2)),
        pytest.param("fsdp:t2", marks=pytest.mark.world(2)),
    ],
)
def test_bf16_adamw_replicas_stay_equal_and_resume_bitwise(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": model_dir("qwen3"), "fsdp": {"optimizer_state_dtype": "bfloat16"}}
    with started(backend, **options) as engine:
        train(engine, range(5))
        expected = weights_of(engine)
        local = {
            f"{name} {p.placements}": p.to_local().tolist()
            for name, p in engine._components.model.named_parameters()
            if isinstance(p, DTensor)
        }
        actual: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            actual, {key: rows for key, rows in local.items() if "norm" in key or backend == "fsdp:r2"}
        )
        if backend in ("fsdp:r2", "fsdp:t2"):
            assert len(actual[0]) >= 9
            assert all(one == actual[0] for one in actual)
        moments = optimizer_tensors(engine._components.optimizer.inner)
        assert moments
        assert all(moment.dtype is torch.bfloat16 for moment in moments)
    with started(backend, **options) as engine:
        train(engine, range(3))
        engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
    with started(backend, **options) as engine:
        engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
        train(engine, range(3, 5))
        assert same_bits(weights_of(engine), expected)
    with started(backend, path=options["path"]) as engine:
        before = weights_of(engine)
        train(engine, range(5))
        for name, weight in weights_of(engine).items():
            assert (weight - expected[name]).norm() <= 0.05 * (weight - before[name]).norm(), name
