"""Carriers of GPUs, with libraries that record calls in place of CUDA, NCCL and its resharding."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from areal.inference.http.group import IPCCarrier, ReshardCarrier, ipc, reshard_carrier
from areal.inference.http.group.reshard_carrier import Side, leave, side
from areal.inference.http.group.reshard_links import Invitation, Links
from areal.tests.harness.servers.group.nccl_library import Recorded, Stream
from areal.tests.harness.servers.vllm_plugin import areal_fake_m2n
from areal.weight_sync.nccl import NCCLError, NCCLLibrary

POINTER = 4711
"""The communicator of :class:`Recorded`."""


@pytest.fixture
def cuda() -> Iterator[Stream]:
    """CUDA's streams on a CPU."""
    stream: Any = Stream()
    stream.waited = []
    stream.wait_stream = stream.waited.append
    with (
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "Stream", return_value=stream),
        mock.patch.object(torch.cuda, "current_stream", return_value="current"),
    ):
        yield stream


@pytest.fixture
def resharding(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of ``nccl.m2n.reshard``."""
    calls: list[dict[str, Any]] = []

    def reshard(src: Any, dst: Any, comm: int, stream: Any, **layouts: Any) -> None:
        calls.append({"src": src, "dst": dst, "comm": comm, "stream": stream, **layouts})

    monkeypatch.setattr(areal_fake_m2n, "reshard", reshard)
    monkeypatch.setattr(reshard_carrier, "import_module", lambda name: areal_fake_m2n)
    return calls


def carrier_on(library: Recorded) -> ReshardCarrier:
    carrier = ReshardCarrier("cuda", library=NCCLLibrary(loaded=library))
    carrier._device = torch.device("cpu", 0)  # of the tensors, which are not sent
    return carrier


def test_link_reshards_on_the_communicator(cuda: Any, resharding: list[dict[str, Any]]) -> None:
    library = Recorded()
    carrier = carrier_on(library)
    carrier.check()
    key = carrier.new_key()
    assert len(base64.b64decode(key, validate=True)) == 128
    before = areal_fake_m2n.Handle.opened
    link = carrier.join(key, 1, 4, 5.0)
    # As the workers: one element is summed before anything else.
    assert library.names() == ["ncclGetUniqueId", "ncclCommInitRankConfig", "ncclAllReduce"]
    table = torch.tensor([[-2, -2], [-1, 1]], dtype=torch.int8)
    with mock.patch.object(torch, "empty", return_value=table):
        assert link.receive(2, 2, 5.0) == [[-2, -2], [-1, 1]]
    name, *arguments = library.calls[-2]
    assert (name, arguments[4]) == ("ncclBroadcast", 2)

    shard = torch.ones(2, 3)
    link.reshard(shard, Side((2, 1), 0, (0, -1)), Side((1, 2), 2, (-1, 1)))
    (call,) = resharding
    assert (call["src"] is shard, call["dst"], call["comm"], call["stream"]) == (True, None, POINTER, cuda)
    assert (call["src_mesh"].dims, call["src_mesh"].start_rank) == ((2, 1), 0)
    assert (call["dst_mesh"].dims, call["dst_mesh"].start_rank) == ((1, 2), 2)
    assert call["src_placements"] == [areal_fake_m2n.Shard(0), areal_fake_m2n.Replicate()]
    assert call["dst_placements"] == [areal_fake_m2n.Replicate(), areal_fake_m2n.Shard(1)]
    # The values were computed on another stream.
    assert cuda.waited == ["current"]

    # The communicator is stopped, and stays until the resharding has given back what it has on it.
    cuda.polls = 10**9
    with pytest.raises(TimeoutError, match=r"the work on the stream did not end within 0\.1 s"):
        link.wait(0.1)
    assert library.names()[-1] == "ncclCommRevoke"
    with pytest.raises(NCCLError, match="the communicator was revoked"):
        link.wait(5.0)
    leave([link], busy=True)
    assert library.names()[-2:] == ["ncclCommRevoke", "ncclCommAbort"]
    assert areal_fake_m2n.Handle.opened == before


def test_communicator_is_released_if_the_resharding_does_not_start(
    cuda: Any, resharding: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(config: Any) -> None:
        raise OSError("NCCL is older than 2.30.5")

    library = Recorded()
    carrier = carrier_on(library)
    key = carrier.new_key()
    monkeypatch.setattr(areal_fake_m2n.Handle, "create", fails)
    # On every rank, before any server waits for it.
    with pytest.raises(OSError, match=r"older than 2\.30\.5"):
        carrier.check()
    with pytest.raises(OSError, match=r"older than 2\.30\.5"):
        carrier.join(key, 0, 2, 5.0)
    assert library.names()[-1] == "ncclCommAbort"


class Steps:
    """A link that records the order of what is done to several."""

    def __init__(self, name: str, done: list[str]) -> None:
        for step in ("revoke", "finalize", "abort"):
            setattr(self, step, partial(done.append, f"{step} {name}"))


def test_no_group_is_left_before_the_resharding_has_ended_on_all() -> None:
    done: list[str] = []
    links: list[Any] = [Steps("a", done), Steps("b", done)]
    leave(links, busy=False)
    assert done == ["finalize a", "finalize b", "abort a", "abort b"]
    done.clear()
    leave(links, busy=True)
    assert done[:3] == ["revoke a", "revoke b", "finalize a"]


class Slow(ReshardCarrier):
    """A carrier on which joining takes until the groups are left."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.done: list[str] = []
        self.links: Links | None = None

    def join(self, key: str, rank: int, size: int, seconds: float) -> Any:
        assert self.links is not None
        self.links.abort()
        link: Any = Steps(key, self.done)
        link.receive = lambda root, rows, seconds: []
        return link


def test_groups_that_were_left_while_their_members_joined_are_not_used() -> None:
    carrier = Slow()
    carrier.links = links = Links(carrier, 0)
    links.accept([Invitation("key", (0,), 2, (1, 1), 0)])
    with pytest.raises(RuntimeError, match="the groups were left while their members joined"):
        links.join(1.0)
    assert carrier.done == ["revoke key", "finalize key", "abort key"]
    links.wait(1.0)  # there is none


def test_what_all_ranks_have_lies_on_an_axis_of_one_rank() -> None:
    assert side((2, 3), 4, None) == ((6, 1), 4, (-1, 0))
    assert side((2, 3), 4, (-1, 1)) == ((2, 3), 4, (-1, 1))


def test_missing_package_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(reshard_carrier, "import_module", missing)
    carrier = carrier_on(Recorded())
    with pytest.raises(RuntimeError, match=r"nccl\.m2n is missing .*: install nccl-extensions\[cu13\] \(cu12\)"):
        carrier.check()
    with pytest.raises(ValueError, match="device = 'cpu': NCCL needs a GPU"):
        ReshardCarrier("cpu")


def test_memory_is_shared_under_the_id_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[torch.Tensor] = []

    def reduce(tensor: torch.Tensor) -> Any:
        shared.append(tensor)
        return "rebuild_cuda_tensor", ("handle", len(tensor))

    monkeypatch.setattr(ipc, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-of-{device}"))
    collected: list[bool] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append(True))
    carrier = IPCCarrier()
    buffer = torch.arange(9, dtype=torch.uint8)[1:8]
    assert carrier.share(buffer) == {"GPU-of-cpu": ("handle", 7)}
    # torch may keep what was shared for ever: that does not own the memory.
    assert torch.equal(shared[0], buffer)
    assert shared[0].data_ptr() == buffer.data_ptr()
    assert shared[0].untyped_storage().nbytes() == 7
    carrier.reclaim()
    assert collected == [True]
    with pytest.raises(ValueError, match="chunk_bytes = 0: it must be above 0"):
        IPCCarrier(0)
