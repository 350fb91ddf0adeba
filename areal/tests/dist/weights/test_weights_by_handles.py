"""Weights that the worker on each rank's GPU loads from the memory of that rank; the memory of each GPU is a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from areal.api import TrainEngine
from areal.api.weights import NamedTensor
from areal.inference.http import VLLM
from areal.tests.grid.models import model_dir
from areal.tests.harness.servers.group.memory import FileCarrier, FileMemory
from areal.tests.harness.servers.group.sending import GroupSending, version_in
from areal.tests.harness.servers.group.server import GroupServer
from areal.tests.harness.tiny import chosen, global_batch, local_batch, loss, same_bits, started, weights_of
from areal.tests.harness.world import world

ONE_AFTER_THE_OTHER = 1
ALL = 2**30


@contextmanager
def serving(
    engine: Any, chunk_bytes: int, workers: int | None = None
) -> Iterator[tuple[GroupSending, GroupServer | None]]:
    """Start a server with a worker on the GPU of each rank, and the transport to it. The server is on the first rank."""
    shapes = {name: tensor.shape for name, tensor in weights_of(engine).items()}
    server = GroupServer(shapes, workers or world().size) if world().rank == 0 else None
    carrier = FileCarrier(f"gpu-{world().rank}", chunk_bytes)
    urls = [] if server is None else [server.url]
    try:
        with GroupSending(urls, VLLM(), carrier, control=engine.control) as sending:
            yield sending, server
            # Memory that servers need stays free between updates.
            assert carrier.reclaimed
            assert not any(len(buffer) for buffer in carrier.given._buffers)
    finally:
        if server is not None:
            server.die()


def assert_loaded(server: GroupServer | None, expected: dict[str, torch.Tensor], version: int) -> None:
    if server is not None:
        assert (version_in(server.label), server.paused) == (str(version), False)
        for worker in server.workers:
            assert same_bits(worker.weights, expected)


@pytest.mark.parametrize("chunk_bytes", [30_000, ALL, ONE_AFTER_THE_OTHER])
@pytest.mark.parametrize(
    "backend", chosen("fsdp:d1", "fsdp:d2", "fsdp:t2", "megatron:p2", "jax:d2", "fsdp:d2t2", "fsdp:e2")
)
def test_each_worker_loads_from_the_memory_of_its_gpu(backend: str, chunk_bytes: int) -> None:
    path = model_dir("qwen3_moe" if "e2" in backend else "qwen3")
    with started(backend, path=path) as engine, serving(engine, chunk_bytes) as (sending, server):
        for version in (1, 2):
            engine.train_batch(local_batch(engine, global_batch()), loss)
            expected = weights_of(engine)
            meta = sending.send(engine, version)
            assert (meta.n_tensors, meta.nbytes) == (len(expected), sum(x.nbytes for x in expected.values()))
            assert_loaded(server, expected, version)
        if server is not None:
            # Nothing is to be joined again.
            assert server.calls.count("/init_weight_transfer_engine") == 1
            assert server.bodies["/init_weight_transfer_engine"] == {"init_info": {"packed": True}}


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "fsdp:d2"))
def test_memory_is_filled_again_after_it_was_loaded(backend: str) -> None:
    """A server that reads late finds each chunk as it was announced."""
    with started(backend) as engine, serving(engine, ONE_AFTER_THE_OTHER) as (sending, server):
        if server is not None:
            server.late["/update_weights"] = 0.05
        expected = weights_of(engine)
        sending.send(engine, 1)
        assert_loaded(server, expected, 1)


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "fsdp:d2"))
def test_worker_without_a_rank_on_its_gpu_is_an_error_on_all_ranks(backend: str) -> None:
    size = world().size
    with started(backend) as engine, serving(engine, 30_000, workers=size + 1) as (sending, server):
        with pytest.raises(
            RuntimeError, match=rf"not found for GPU UUID gpu-{size}.*version 1 was not sent; servers that"
        ):
            sending.send(engine, 1)
        if server is not None:
            assert version_in(server.label) == "interrupted"
            del server.workers[size:]
        engine.train_batch(local_batch(engine, global_batch()), loss)
        expected = weights_of(engine)
        sending.send(engine, 2)
        assert_loaded(server, expected, 2)


class BreaksOnOneRank:
    """An engine whose last rank fails at a tensor."""

    def __init__(self, engine: TrainEngine, at: int) -> None:
        self._engine, self._at = engine, at

    def named_tensors(self) -> Iterator[NamedTensor]:
        for i, each in enumerate(self._engine.named_tensors()):
            if i == self._at and world().rank == world().size - 1:
                raise OSError("no memory is left")
            yield each


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "fsdp:d2"))
def test_error_of_one_rank_ends_the_update_on_all(backend: str) -> None:
    with started(backend) as engine, serving(engine, ONE_AFTER_THE_OTHER) as (sending, server):
        with pytest.raises(RuntimeError, match=r"OSError: no memory is left.*version 1 was not sent"):
            sending.send(BreaksOnOneRank(engine, 5), 1)
        expected = weights_of(engine)
        sending.send(engine, 2)
        assert_loaded(server, expected, 2)
        with pytest.raises(ValueError, match="servers over a process group receive all tensors"):
            sending.send(engine, 3, select=lambda name: "norm" in name)


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "fsdp:d2", "fsdp:t2"))
def test_rank_without_memory_is_an_error_on_all(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks gather the tensors of the chunk, and are not left waiting for it."""
    full = [world().rank == world().size - 1]

    def allocate(self: Any, nbytes: int) -> torch.Tensor:
        if full[0]:
            raise torch.OutOfMemoryError("no memory is left on the GPU")
        return make(self, nbytes)

    make = FileMemory.allocate
    monkeypatch.setattr(FileMemory, "allocate", allocate)
    with started(backend) as engine, serving(engine, 30_000) as (sending, server):
        with pytest.raises(RuntimeError, match=r"no memory is left on the GPU.*version 1 was not sent"):
            sending.send(engine, 1)
        full[0] = False
        expected = weights_of(engine)
        sending.send(engine, 2)
        assert_loaded(server, expected, 2)
