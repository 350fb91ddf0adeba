"""Weights that each rank sends by slices: bytes per rank, the same bits at all receivers, and updates that fail."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from areal.tests.dist.parallel.collective_bytes import Traffic, streamed
from areal.tests.grid.models import FAMILIES, model_dir, tiny_model
from areal.tests.harness.limits import promptly
from areal.tests.harness.tiny import chosen, global_batch, local_batch, loss, same_bits, started, weights_of
from areal.tests.harness.world import record, world
from areal.weight_sync import ModuleSource, SliceReceiver, SliceTransport

RECEIVERS = 2
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


def receivers(transport: SliceTransport, modules: list[nn.Module], updates: int = 1) -> list[Receiver]:
    """Run receivers on the ranks in turn. Returns those of this rank."""
    here = [index for index in range(len(modules)) if index % world().size == world().rank]
    return [Receiver(transport.port, index, modules[index], updates) for index in here]


def replica(dtype: torch.dtype = torch.float32, family: str = "qwen3") -> nn.Module:
    return tiny_model(FAMILIES[family](), 7).to(dtype)


@pytest.mark.parametrize("backend", chosen(*SCALES, "fsdp:p2", "fsdp:e2", "megatron:p2", "jax:d2", "jax:t2"))
def test_each_rank_sends_its_share_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.2 times the model's bytes over the number of ranks, with names and boxes. Nothing is gathered."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", Counted)
    monkeypatch.setattr(Counted, "nbytes", 0)
    family = "qwen3_moe" if "e2" in backend else "qwen3"
    with started(backend, path=model_dir(family)) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        expected, gathered = streamed(engine, None)
        model = sum(x.nbytes for x in expected.values())
        transport = SliceTransport(engine.control, RECEIVERS, timeout=30)
        here = receivers(transport, [replica(family=family) for _ in range(RECEIVERS)])
        with Traffic() as traffic:
            meta = transport.send(engine, 5)
        assert traffic.nbytes == 0
        for each in here:
            assert same_bits(each.weights(), expected)
            assert each.receiver.version == 5
            # Each passes on half of the model, to the other one.
            assert backend not in SCALES or each.receiver.sent_bytes < 0.6 * model
        assert (meta.version, meta.n_tensors, meta.nbytes) == (5, len(expected), model)
        ranks = world().size
        sent = engine.control.gather((transport.sent_bytes, Counted.nbytes))
        transport.close()
    assert all(own == counted for own, counted in sent)
    record(
        "bytes that a rank sends in an update, of the model's bytes over the ranks",
        backend,
        slices=max(own for own, _ in sent) / (model / ranks),
        taken_by_gathers=gathered / (model / ranks),
    )
    if backend in SCALES:
        assert max(own for own, _ in sent) <= 1.2 * model / ranks


@pytest.mark.parametrize("backend", chosen("fsdp:d2"))
def test_update_that_does_not_fit_a_receiver_changes_none(backend: str) -> None:
    """The error is raised on all ranks, with the receiver's number, and the next update arrives."""
    with started(backend) as engine:
        expected = weights_of(engine)
        transport = SliceTransport(engine.control, 2, timeout=30)
        bias = nn.Linear(3, 3)
        fitting, other = replica(), replica()
        other.extra = bias
        before = {name: x.clone() for name, x in ModuleSource(fitting).named_tensors()}
        here = receivers(transport, [fitting, other], updates=3)
        with pytest.raises(ValueError, match=r"receiver 1: .*did not send 'extra.weight'.*version 1 was not sent"):
            transport.send(engine, 1)
        assert same_bits({name: x.clone() for name, x in ModuleSource(fitting).named_tensors()}, before)
        # A subset fits both.
        assert transport.send(engine, 2, select=lambda name: "norm" in name).kind == "selected"
        with pytest.raises(ValueError, match="no tensor was selected"):
            transport.send(engine, 3, select=lambda name: False)
        for each in here:
            values = each.weights()
            assert each.receiver.version == 2
            assert [error[:21] for error in each.errors] == ["version 1 was aborted", "version 3 was aborted"]
            assert all(torch.equal(x, expected[name]) for name, x in values.items() if "norm" in name)
        transport.close()


@pytest.mark.parametrize("backend", chosen("fsdp:d2"))
def test_lost_receiver_is_an_error_on_all_ranks(backend: str) -> None:
    with started(backend) as engine:
        transport = SliceTransport(engine.control, 3, cast=torch.bfloat16, timeout=5)
        here = receivers(transport, [replica(torch.bfloat16) for _ in range(3)])
        meta = transport.send(engine, 1)
        expected = {name: x.bfloat16() for name, x in weights_of(engine).items()}
        assert meta.nbytes == 2 * sum(x.numel() for x in expected.values())
        for each in here:
            assert same_bits(each.weights(), expected)
            each.receiver.close()
        del here
        with pytest.raises(RuntimeError, match=r"a receiver is lost"):
            transport.send(engine, 2)
        with pytest.raises(RuntimeError, match="make another transport and other receivers"):
            transport.send(engine, 3)
        engine.train_batch(local_batch(engine, global_batch()), loss)
        with pytest.raises(ValueError, match="receivers = 0: give at least 1"):
            SliceTransport(engine.control, 0)
        source = ModuleSource(replica())
        other = SliceTransport(engine.control, 1, timeout=5)
        (received,) = receivers(other, [replica()]) or [None]
        with pytest.raises(ValueError, match="a ModuleSource has no slices"):
            other.send(source, 1)
        if received is not None:
            received.join(30)
            assert "version 1 was aborted" in received.errors[0]


@pytest.mark.parametrize("backend", chosen("fsdp:d2"))
def test_receivers_that_join_too_late_need_another_transport(backend: str) -> None:
    """The addresses of the first attempt stay in the store: each later update would wait for them."""
    with started(backend) as engine:
        expected = weights_of(engine)
        transport = SliceTransport(engine.control, 1, timeout=2)
        with pytest.raises(RuntimeError, match="not all of 1 receivers joined within 2 s: make another transport"):
            transport.send(engine, 1)
        with promptly(), pytest.raises(RuntimeError, match="make another transport and other receivers"):
            transport.send(engine, 2)
        other = SliceTransport(engine.control, 1, timeout=30)
        here = receivers(other, [replica()])
        other.send(engine, 3)
        for each in here:
            assert same_bits(each.weights(), expected)
