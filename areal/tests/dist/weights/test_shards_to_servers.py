"""Weights that each rank sends as shards to the workers of servers; gloo stands for NCCL's resharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal.inference.http import VLLM
from areal.inference.http.group import reshard_plan
from areal.inference.http.group.reshard_plan import RankTraffic
from areal.tests.dist.parallel.collective_bytes import Traffic
from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import promptly
from areal.tests.harness.servers.group.resharding import GlooReshardCarrier
from areal.tests.harness.servers.group.sending import GroupSending, version_in
from areal.tests.harness.servers.group.server import GroupServer
from areal.tests.harness.servers.vllm_plugin import areal_fake_m2n
from areal.tests.harness.tiny import chosen, global_batch, local_batch, loss, started, weights_of
from areal.tests.harness.world import record, world
from areal.weight_sync import ModuleSource

DIRECT = ("fsdp:d1", "fsdp:d2", "fsdp:t2", "megatron:d2", "megatron:t2", "jax:d2", "jax:t2")
"""Layouts in which each rank sends what it has."""
EXCHANGED = ("fsdp:d2t2", "fsdp:p2", "fsdp:e2", "megatron:p2")


@contextmanager
def serving(
    engine: Any, workers: Sequence[tuple[int, int]], **options: Any
) -> Iterator[tuple[GroupSending, list[GroupServer], GlooReshardCarrier]]:
    """Start servers on the first rank, each with a number of workers and of replicas, and the transport to them."""
    shapes = {name: tensor.shape for name, tensor in weights_of(engine).items()}
    carrier = GlooReshardCarrier()
    with ExitStack() as stack:
        servers = [GroupServer(shapes, *each) for each in workers] if world().rank == 0 else []
        for server in servers:
            stack.callback(server.die)
        urls = [server.url for server in servers]
        sending = GroupSending(urls, VLLM(), carrier, control=engine.control, **options)
        yield stack.enter_context(sending), servers, carrier
    assert all(link._comm is None for link in carrier.links)


def assert_received(server: GroupServer, expected: dict[str, torch.Tensor], version: int) -> None:
    """Check that every worker has its part of each tensor."""
    assert (version_in(server.label), server.paused) == (str(version), False)
    shards = len(server.workers) // server.replicas
    for index, worker in enumerate(server.workers):
        assert worker.weights.keys() == expected.keys()
        for name, placements in zip(worker.plan["names"], worker.taken, strict=True):
            want = expected[name]
            if placements is not None:
                want = want.chunk(shards, placements[1])[index % shards]
            assert torch.equal(worker.weights[name], want), name


@pytest.mark.parametrize("backend", chosen(*DIRECT, *EXCHANGED))
def test_every_worker_has_its_part_after_each_update(backend: str) -> None:
    """Of a server with one worker, one with two, and one with two replicas of two."""
    path = model_dir("qwen3_moe" if "e2" in backend else "qwen3")
    with (
        started(backend, path=path) as engine,
        serving(engine, [(1, 1), (2, 1), (4, 2)]) as (sending, servers, carrier),
    ):
        for version in (1, 2):
            engine.train_batch(local_batch(engine, global_batch()), loss)
            expected = weights_of(engine)
            meta = sending.send(engine, version)
            assert (meta.n_tensors, meta.nbytes) == (len(expected), sum(x.nbytes for x in expected.values()))
            for server in servers:
                assert_received(server, expected, version)
        # One group with each server for both updates.
        assert len(carrier.links) == 3
        assert all(server.calls.count("/init_weight_transfer_engine") == 1 for server in servers)
        assert all(any(each and each[1] == 1 for each in server.workers[0].taken) for server in servers[1:])


class Messages(TorchDispatchMode):
    """Counts the bytes that this rank sends to other ranks of the trainer, that it receives from them, and of other collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.received = 0
        self.collectives = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::send":
            self.sent += sum(x.nbytes for x in args[0])
        if func.name() == "c10d::recv_":
            self.received += sum(x.nbytes for x in args[0])
        return self.collectives.__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("backend", chosen(*DIRECT, *EXCHANGED))
def test_each_rank_sends_its_share(backend: str) -> None:
    """To each of two servers the model's bytes over the number of ranks; what ranks exchange is less, and nothing without need."""
    path = model_dir("qwen3_moe" if "e2" in backend else "qwen3")
    with started(backend, path=path) as engine:
        model = sum(x.nbytes for x in weights_of(engine).values())
        with serving(engine, [(1, 1), (1, 1)]) as (sending, _, carrier):
            with Messages() as messages:
                sending.send(engine, 1)
            rank = RankTraffic(carrier.sent_bytes, messages.sent, messages.received)
            ranks = engine.control.gather((rank, messages.collectives.nbytes))  # type: ignore[attr-defined]
    share = model / world().size
    most = RankTraffic(*(max(each[column] for each, _ in ranks) for column in range(3)))
    record(
        "bytes of a rank for two servers, of the model's bytes over the ranks",
        backend,
        **{name: f"{number / share:.2f}" for name, number in most._asdict().items()},
    )
    assert sum(each.to_servers for each, _ in ranks) == 2 * model
    assert most.to_servers <= 2 * 1.2 * share
    assert sum(each.to_ranks for each, _ in ranks) == sum(each.from_ranks for each, _ in ranks)
    assert most.from_ranks <= share
    assert all(nbytes == 0 for _, nbytes in ranks)
    # JAX tells what all of its ranks have on the first one only, such as the norms of heads.
    assert backend not in DIRECT or most.to_ranks <= ("jax" in backend) * 0.02 * model


@pytest.mark.parametrize("backend", chosen("fsdp:d4", "fsdp:d2t2", "fsdp:p2t2"))
def test_more_ranks_than_blocks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, of four ranks: neighbours assemble the same one, and send it to different servers."""
    monkeypatch.setattr(reshard_plan, "MOST_SHARDS", 2)
    with started(backend) as engine:
        model = sum(x.nbytes for x in weights_of(engine).values())
        with serving(engine, [(1, 1), (2, 1), (1, 1)]) as (sending, servers, carrier):
            for version in (1, 2):
                engine.train_batch(local_batch(engine, global_batch()), loss)
                expected = weights_of(engine)
                before = carrier.sent_bytes
                with Messages() as messages:
                    sending.send(engine, version)
                for server in servers:
                    assert_received(server, expected, version)
            rank = (carrier.sent_bytes - before, messages.received, len(carrier.links))
            ranks = engine.control.gather(rank)  # type: ignore[attr-defined]
    # The first of two neighbours has the first and the last server.
    assert sorted(links for _, _, links in ranks) == [1, 1, 2, 2]
    assert max(sent for sent, _, _ in ranks) <= 2 * 1.2 * model / 2
    assert max(received for _, received, _ in ranks) <= model / 2


@pytest.mark.parametrize("backend", chosen("fsdp:d4"))
def test_error_of_a_server_of_another_rank_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that knows the error does not send to this server."""
    monkeypatch.setattr(reshard_plan, "MOST_SHARDS", 2)
    with started(backend) as engine, serving(engine, [(1, 1), (1, 1)], timeout=5.0) as (sending, servers, _):
        missing = "model.layers.1.mlp.down_proj.weight"
        for server in servers[1:]:
            server.workers[0].known.remove(missing)
        with promptly(), pytest.raises(RuntimeError, match=rf"no module or parameter named '{missing}'"):
            sending.send(engine, 1)
        for server in servers[1:]:
            server.workers[0].known.add(missing)
        expected = weights_of(engine)
        sending.send(engine, 2)
        for server in servers:
            assert_received(server, expected, 2)


class Seen:
    """An engine as another source."""

    def __init__(self, engine: Any) -> None:
        self.local_tensors = engine.local_tensors


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "fsdp:d2"))
def test_groups_are_made_again_for_another_source_or_server(backend: str) -> None:
    with started(backend) as engine, serving(engine, [(1, 1), (2, 1)]) as (sending, servers, carrier):
        other = Seen(engine)
        for version, (source, groups) in enumerate([(engine, 2), (other, 4), (other, 4), (engine, 6)]):
            expected = weights_of(engine)
            sending.send(source, version)
            for server in servers:
                assert_received(server, expected, version)
            assert len(carrier.links) == groups
        for server in servers[:1]:
            server.start_anew()
            sending.servers[0].restarts += 1
        sending.send(engine, 5)
        assert len(carrier.links) == 8
        for server in servers:
            assert_received(server, expected, 5)


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "fsdp:d2"))
def test_weights_are_cast_before_they_are_sent(backend: str) -> None:
    with started(backend) as engine, serving(engine, [(2, 1)], cast=torch.bfloat16) as (sending, servers, _):
        expected = {name: x.bfloat16() for name, x in weights_of(engine).items()}
        assert sending.send(engine, 1).nbytes == sum(x.nbytes for x in expected.values())
        for server in servers:
            assert_received(server, expected, 1)


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "fsdp:d2", "fsdp:p2"))
def test_refused_tensor_is_an_error_on_all_ranks(backend: str) -> None:
    """The server is healed by the next update, in new groups."""
    with started(backend) as engine, serving(engine, [(1, 1), (1, 1)], timeout=5.0) as (sending, servers, _):
        missing = "model.layers.1.mlp.down_proj.weight"
        for server in servers[1:]:
            server.workers[0].known.remove(missing)
        # The other ranks wait for the lost group until their time limit.
        with (
            promptly(),
            pytest.raises(RuntimeError, match=rf"no module or parameter named '{missing}'.*version 1 was not sent"),
        ):
            sending.send(engine, 1)
        for server in servers[1:]:
            server.workers[0].known.add(missing)
        assert len(sending.faults) == len(servers)
        expected = weights_of(engine)
        sending.send(engine, 2)
        for server in servers:
            assert_received(server, expected, 2)
        assert not sending.faults
        engine.train_batch(local_batch(engine, global_batch()), loss)


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "fsdp:d2"))
def test_group_that_is_not_made_is_an_error_on_all_ranks(backend: str) -> None:
    with started(backend) as engine, serving(engine, [(1, 1)], timeout=3.0) as (sending, servers, _):
        for server in servers:
            server.broken["/init_weight_transfer_engine"] = (500, "nccl_m2n requires the nccl-extensions package")
        with promptly(), pytest.raises(RuntimeError, match="requires the nccl-extensions package"):
            sending.send(engine, 1)
        with pytest.raises(ValueError, match="a ModuleSource has no shards"):
            sending.send(ModuleSource(torch.nn.Linear(2, 2)), 2)
        with pytest.raises(ValueError, match="servers over a process group receive all tensors"):
            sending.send(engine, 2, select=lambda name: "norm" in name)
        expected = weights_of(engine)
        sending.send(engine, 3)
        for server in servers:
            assert_received(server, expected, 3)
    assert areal_fake_m2n.Handle.opened == 0
