"""A process that is left after the loss of a rank goes on in another world."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from areal.api import FinetuneSpec, SaveLoadMeta
from areal.dispatch.executor import RankObjects
from areal.dispatch.rank_calls import initialize, load
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import NEEDS_JAX, config, global_batch, local_batch, loss, same_bits, weights_of
from areal.utils.distributed import EngineLostError, enter_world, leave_world

SPEC = FinetuneSpec(total_train_steps=10)


def go_on_without_rank_1(before: str, after: str, folder: str) -> None:
    """Lose rank 1 in a step of a layout of two ranks, and go on in another layout."""
    rank, meta = dist.get_rank(), SaveLoadMeta(folder, weight_format="dcp")

    def loss_that_ends_rank_1(out: Any, batch: Any) -> Tensor:
        if rank == 1:
            os._exit(0)
        return loss(out, batch)

    objects = RankObjects(rank, 2)
    initialize("engine", "owner", config(before), SPEC, objects, None)
    engine = objects.engine("engine")
    engine.train_batch(local_batch(engine, global_batch()), loss)
    engine.save(meta)
    weights = weights_of(engine)
    expected = engine.train_batch(local_batch(engine, global_batch(1)), loss)
    with pytest.raises(EngineLostError):
        engine.train_batch(local_batch(engine, global_batch(2)), loss_that_ends_rank_1)

    # As a process of a rank does.
    objects.clear()
    leave_world()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    enter_world(0, 1, (0, 1), "127.0.0.1", store.port)
    objects = RankObjects(0, 1)
    initialize("engine", "owner", config(after), SPEC, objects, None)
    load("engine", meta, objects, None)
    engine = objects.engine("engine")
    assert dist.get_world_size() == 1
    assert same_bits(weights_of(engine), weights)
    step = engine.train_batch(global_batch(1), loss)
    assert (step.loss, step.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)
    objects.clear()


@needs_own_world
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp:d2", "fsdp:d1"),
        ("megatron:t2", "megatron:d1"),
        ("fsdp:p2", "megatron:d1"),
        pytest.param("jax:d2", "jax:d1", marks=[NEEDS_JAX, pytest.mark.timeout(400)]),
    ],
)
def test_a_process_goes_on_in_another_world(before: str, after: str, tmp_path: Path) -> None:
    succeed(2, go_on_without_rank_1, before, after, str(tmp_path / "step"), timeout=300 if "jax" in before else 90)
