"""Messages between Megatron's pipeline stages: activations and gradients of the length of their micro-batch, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

from areal.api import ParallelDims, TrainEngine
from areal.engine.megatron.schedule import micro_batches_of_messages
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import global_batch, local_batch, loss, started
from areal.tests.harness.world import world


@contextmanager
def received() -> Iterator[list[Tensor]]:
    """List the tensors that the stages receive from now on."""
    tensors: list[Tensor] = []
    right = dist.irecv

    def receive(tensor: Tensor, *args: Any, **options: Any) -> Any:
        tensors.append(tensor)
        return right(tensor, *args, **options)

    # Both modules, because a batched operation must be one of the functions in the second.
    with mock.patch.object(dist, "irecv", receive), mock.patch.object(dist.distributed_c10d, "irecv", receive):
        yield tensors


def steps(engine: TrainEngine) -> list[float]:
    """Two steps and an evaluation."""
    trained = [engine.train_batch(local_batch(engine, global_batch(seed)), loss) for seed in range(2)]
    evaluated = engine.eval_batch(local_batch(engine, global_batch(2)), loss)
    return [x for step in trained for x in (step.loss, step.grad_norm)] + [evaluated.loss]


def tolist_outside_of_messages(self: Tensor, right: Any = Tensor.tolist) -> Any:
    """Read a tensor, but not in Megatron's communication between stages."""
    assert sys._getframe(1).f_globals["__name__"] != p2p_communication.__name__, "the host reads a shape"
    return right(self)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=pytest.mark.world(ParallelDims.parse(backend).world_size))
        for backend in ("megatron:p2", "megatron:p2v2", "megatron:p4", "megatron:p2t2", "megatron:c2p2")
    ],
)
def test_stages_exchange_no_shapes_and_the_host_does_not_wait(backend: str) -> None:
    dims, path = ParallelDims.parse(backend), model_dir("qwen3", num_hidden_layers=4)
    with started(f"megatron:d{dims.world_size}", path=path) as engine:
        expected = steps(engine)
    with started(backend, path=path) as engine:
        assert steps(engine) == pytest.approx(expected, rel=1e-5)
        schedule = engine._require_components().schedule
        with (
            received() as tensors,
            mock.patch.object(schedule, "run", wraps=schedule.run) as run,
            mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError("the host waits")),
            mock.patch.object(Tensor, "tolist", tolist_outside_of_messages),
        ):
            engine.train_batch(local_batch(engine, global_batch()), loss)
    lengths = [mb.padded_length for mb in run.call_args.args[0]]
    assert len(set(lengths)) > 1
    # A chunk has a message from each of its neighbours, where it has one.
    stage, last = world().rank // (dims.world_size // dims.pp), dims.pp - 1
    links = 2 * dims.vpp - (stage == 0) - (stage == last)
    messages = [x.shape[0] * dims.cp * dims.tp for x in tensors if x.dim() == 3]
    assert sorted(messages) == sorted(lengths * links)
    assert not [x for x in tensors if x.shape == (3,) and x.dtype == torch.int64]


def test_ends_of_an_interleaved_pipeline_exchange_all_chunks_but_one() -> None:
    in_order = [(0, 0), (1, 0), (2, 0)]
    assert micro_batches_of_messages(in_order, 0, 2, 1) == ([], [0, 1, 2])
    assert micro_batches_of_messages(in_order, 1, 2, 1) == ([0, 1, 2], [])
    table, every = get_schedule_table(4, 2, 2), [0, 1, 0, 1, 2, 3, 2, 3]
    assert micro_batches_of_messages(table, 0, 2, 2) == ([0, 1, 2, 3], every)
    assert micro_batches_of_messages(table, 1, 2, 2) == (every, [0, 1, 2, 3])
    assert micro_batches_of_messages(table, 1, 3, 2) == (every, every)
