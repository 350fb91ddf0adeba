"""Weights that each rank sends by slices: bytes per rank, the same bits at all receivers, and updates that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from areal.tests.dist.parallel.test_gathered_bytes import Traffic, streamed
from areal.tests.grid.models import FAMILIES, model_dir, tiny_model
from areal.tests.harness.tiny import chosen, global_batch, local_batch, loss, same_bits, started, weights_of
from areal.tests.harness.world import record, world
from areal.weight_sync import ModuleSource, SliceReceiver, SliceTransport
from areal.weight_sync.chain import WeightSlice

RECEIVERS = 3
SCALES = ("fsdp:d2", "fsdp:t2", "fsdp:d2t2", "megatron:d2", "megatron:t2")
"""Layouts that divide a model evenly; others do as far as their stages and experts are equal."""


class Receiver(threading.Thread):
    """A receiver in a thread."""

    def __init__(self, port: int, index: int, module: nn.Module, updates: int = 1) -> None:
        super().__init__(daemon=True)
        self.module, self.errors = module, list[str]()
        self.receiver = SliceReceiver(module, port, index, timeout=30)
        self._updates = updates
        self.start()

    def run(self) -> None:
        for _ in range(self._updates):
            try:
                self.receiver.receive(30)
            except (ValueError, RuntimeError) as error:
                self.errors.append(str(error))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights after all updates."""
        self.join(30)
        return {name: x.clone() for name, x in ModuleSource(self.module).named_tensors()}


class Counted:
    """A group of gloo that counts the bytes that a trainer rank gives it to send."""

    made = dist.ProcessGroupGloo
    nbytes = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._group, self._rank = self.made(store, rank, size, timeout), rank
        self.recv = self._group.recv

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if self._rank == 0:
            Counted.nbytes += sum(x.nbytes for x in tensors)
        return self._group.send(tensors, rank, tag)


@contextmanager
def receivers(transport: SliceTransport, modules: list[nn.Module], updates: int = 1) -> Iterator[list[Receiver]]:
    """Run receivers on the ranks in turn. Yields those of this rank."""
    size = world().size
    yield [
        Receiver(transport.port, index, module, updates)
        for index, module in enumerate(modules)
        if index % size == world().rank
    ]


def replica(dtype: torch.dtype = torch.float32, family: str = "qwen3") -> nn.Module:
    return tiny_model(FAMILIES[family](), 7).to(dtype)


@pytest.mark.parametrize("backend", chosen(*SCALES, "fsdp:p2", "fsdp:e2", "megatron:p2", "jax:d2", "jax:t2"))
def test_each_rank_sends_its_share_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.2 times the model's bytes over the number of ranks, where the gather alone takes more than that."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", Counted)
    monkeypatch.setattr(Counted, "nbytes", 0)
    family = "qwen3_moe" if "e2" in backend else "qwen3"
    with started(backend, path=model_dir(family)) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        expected, gathered = streamed(engine, None)
        model = sum(x.nbytes for x in expected.values())
        transport = SliceTransport(engine.control, RECEIVERS, timeout=30)
        with receivers(transport, [replica(family=family) for _ in range(RECEIVERS)]) as here:
            with Traffic() as traffic:
                meta = transport.send(engine, 5)
            assert traffic.nbytes == 0
            for each in here:
                assert same_bits(each.weights(), expected)
                assert each.receiver.version == 5
                assert each.receiver.sent_bytes < 1.05 * model
        assert (meta.version, meta.n_tensors, meta.nbytes) == (5, len(expected), model)
        # Bytes of names and boxes are not in proportion to those of a tiny model.
        ranks = world().size
        sent = engine.control.gather((transport.sent_bytes, Counted.nbytes))
        transport.close()
    assert all(own == counted for own, counted in sent)
    record(
        "bytes that a rank sends in an update, of the model's bytes over the ranks",
        backend,
        slices=max(own for own, _ in sent) / (model / ranks),
        gather=gathered * (ranks - 1) / (model / ranks),
    )
    if backend in SCALES:
        assert max(own for own, _ in sent) <= 1.2 * model / ranks
