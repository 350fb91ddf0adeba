"""Carriers of GPUs, with libraries that record calls in place of CUDA, NCCL and its resharding."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from areal.inference.http.group import IPCCarrier, ReshardCarrier, ipc, reshard_carrier
from areal.inference.http.group.reshard_carrier import Side, side
from areal.tests.harness.servers.group.nccl_library import Recorded, Stream
from areal.tests.harness.servers.vllm_plugin import areal_fake_m2n
from areal.weight_sync.nccl import NCCLLibrary

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
    carrier.device = torch.device("cpu")  # of the tensors, which are not sent
    return carrier


def test_link_reshards_on_the_communicator(cuda: Any, resharding: list[dict[str, Any]]) -> None:
    library = Recorded()
    carrier = carrier_on(library)
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

    cuda.polls = 10**9
    with pytest.raises(TimeoutError, match=r"the work on the stream did not end within 0\.1 s"):
        link.wait(0.1)
    link.abort()
    link.abort()
    assert library.names()[-1] == "ncclCommAbort"
    assert areal_fake_m2n.Handle.opened == before


def test_what_all_ranks_have_lies_on_an_axis_of_one_rank() -> None:
    assert side((2, 3), 4, None) == ((6, 1), 4, (-1, 0))
    assert side((2, 3), 4, (-1, 1)) == ((2, 3), 4, (-1, 1))


def test_missing_package_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(reshard_carrier, "import_module", missing)
    carrier = carrier_on(Recorded())
    with pytest.raises(RuntimeError, match=r"nccl\.m2n is missing .*: install nccl-extensions\[cu13\] \(cu12\)"):
        carrier.join(carrier.new_key(), 0, 2, 1.0)
    with pytest.raises(ValueError, match="device = 'cpu': NCCL needs a GPU"):
        ReshardCarrier("cpu")


def test_memory_is_shared_under_the_id_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "reduce_tensor", lambda buffer: ("rebuild_cuda_tensor", ("handle", len(buffer))))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-of-{device}"))
    collected: list[bool] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append(True))
    carrier = IPCCarrier()
    assert carrier.share(torch.zeros(7, dtype=torch.uint8)) == {"GPU-of-cpu": ("handle", 7)}
    carrier.reclaim()
    assert collected == [True]
    with pytest.raises(ValueError, match="chunk_bytes = 0: it must be above 0"):
        IPCCarrier(0)
