"""The GPU of each rank and the backend, for every way in which launchers show GPUs to ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from areal.api import ParallelDims
from areal.utils import distributed, mesh, platform
from areal.utils.group_set import GroupSet
from areal.utils.rank_gpus import VisibleGPUs, check_separate, choose_gpus, exchange, place

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"


def sees(*uuids: str, local_rank: int | None = None) -> VisibleGPUs:
    return VisibleGPUs(uuids, local_rank)


LAUNCHERS: dict[str, tuple[list[VisibleGPUs], list[int], bool]] = {
    "torchrun": ([sees(A, B, local_rank=0), sees(A, B, local_rank=1)], [0, 1], False),
    "torchrun, two hosts": ([sees(A, local_rank=0), sees(B, local_rank=0)], [0, 0], False),
    "one GPU each": ([sees(A), sees(B), sees(C), sees(D)], [0, 0, 0, 0], False),
    "one GPU each, LOCAL_RANK": ([sees(A, local_rank=0), sees(B, local_rank=1)], [0, 0], False),
    "two GPUs each": ([sees(A, B, local_rank=0), sees(C, D, local_rank=1)], [0, 1], False),
    "all GPUs, no LOCAL_RANK": ([sees(A, B), sees(A, B), sees(C, D), sees(C, D)], [0, 1, 0, 1], False),
    "all GPUs, another order": ([sees(A, B), sees(B, A)], [0, 0], False),
    "some with LOCAL_RANK": ([sees(A, B), sees(A, B, local_rank=0)], [1, 0], False),
    "more ranks than GPUs": ([sees(A, local_rank=0), sees(A, local_rank=1)], [0, 0], True),
    "three ranks, two GPUs": ([sees(A, B), sees(A, B), sees(A, B)], [0, 1, 0], True),
}


@pytest.mark.parametrize("launcher", [*LAUNCHERS])
def test_ranks_share_a_gpu_only_where_its_uuid_is_the_same(launcher: str) -> None:
    ranks, indices, shared = LAUNCHERS[launcher]
    assert choose_gpus(ranks) == indices
    placements = [place(ranks, rank) for rank in range(len(ranks))]
    assert [placement.device for placement in placements] == [torch.device("cuda", index) for index in indices]
    assert {placement.backend for placement in placements} == {platform.GLOO if shared else platform.WORLD}
    assert {bool(placement.shared) for placement in placements} == {shared}


def test_ranks_that_share_a_gpu_are_named() -> None:
    assert place([sees(A), sees(B), sees(A)], 1).shared == ((0, 2),)


def test_a_gpu_that_stays_unused_is_refused() -> None:
    """All ranks have the ``LOCAL_RANK`` of one process: they would share the first GPU of two."""
    said = "ranks 0, 1 use the same GPU because of LOCAL_RANK = 0, while no rank uses cuda:1"
    with pytest.raises(ValueError, match=said):
        place([sees(A, B, local_rank=0), sees(A, B, local_rank=0)], 0)


def test_a_rank_without_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1, 2 of 3 sees no GPU, but the others do: .*CUDA_VISIBLE_DEVICES"):
        place([sees(A), sees(), sees()], 0)
    assert place([sees(), sees()], 0).backend == "gloo"


def test_ranks_exchange_their_gpus_through_the_store() -> None:
    ranks = [sees(A), sees(B, local_rank=1), sees(C, A)]
    store, received = dist.HashStore(), {}

    def run(rank: int) -> None:
        received[rank] = exchange(store, rank, len(ranks), ranks[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert received == dict.fromkeys(range(3), ranks)


@contextmanager
def process_with(*uuids: str, **environment: str) -> Iterator[dict[str, Any]]:
    """Act as a process that sees these GPUs. Yields the device and the arguments of the default process group."""
    started: dict[str, Any] = {}

    def init_process_group(backend: str, **options: Any) -> None:
        started.update(backend=backend, **options)

    properties = [SimpleNamespace(uuid=uuid) for uuid in uuids]
    with (
        mock.patch.dict("os.environ", environment, clear=True),
        mock.patch.object(torch.cuda, "is_available", return_value=bool(uuids)),
        mock.patch.object(torch.cuda, "device_count", return_value=len(uuids)),
        mock.patch.object(torch.cuda, "get_device_properties", properties.__getitem__),
        mock.patch.object(torch.cuda, "set_device", lambda device: started.update(device=device)),
        mock.patch.object(dist, "is_initialized", return_value=False),
        mock.patch.object(dist, "init_process_group", init_process_group),
    ):
        yield started


def start_rank_0(uuids: tuple[str, ...], peer: VisibleGPUs, **environment: str) -> dict[str, Any]:
    """Start the default process group on rank 0 of two. Returns its arguments, and the device."""
    store = dist.HashStore()
    thread = threading.Thread(target=exchange, args=(store, 1, 2, peer))
    thread.start()
    with (
        process_with(*uuids, RANK="0", WORLD_SIZE="2", **environment) as started,
        mock.patch.object(dist, "rendezvous", return_value=iter([(store, 0, 2)])),
    ):
        distributed.init_default_group()
    thread.join(20)
    return started


@pytest.mark.parametrize("local", [{}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}])
def test_one_gpu_for_each_process_gets_nccl(local: dict[str, str]) -> None:
    """The number of visible GPUs is smaller than that of local ranks, and yet no GPU is shared."""
    started = start_rank_0((A,), sees(B, local_rank=1), **local)
    assert (started["backend"], started["device"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))
    assert (started["rank"], started["world_size"]) == (0, 2)
    assert started["device_id"] == torch.device("cuda", 0), "groups of some ranks split one communicator"


def test_processes_on_one_gpu_get_gloo_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        started = start_rank_0((A,), sees(A, local_rank=1), LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    assert (started["backend"], started["device"], started["device_id"]) == ("gloo", torch.device("cuda", 0), None)
    assert "ranks 0, 1 share a GPU" in caplog.text


def test_processes_without_local_rank_do_not_all_use_the_first_gpu() -> None:
    assert start_rank_0((A, B), sees(A, B, local_rank=0))["device"] == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("environment", "started", "index"), [({}, False, 0), ({}, True, 1), ({"LOCAL_RANK": "5"}, True, 2)]
)
def test_device_of_a_process(environment: dict[str, str], started: bool, index: int) -> None:
    """Without ``LOCAL_RANK`` it is the GPU that was chosen when the default process group started."""
    with (
        process_with(A, B, C, **environment),
        mock.patch.object(dist, "is_initialized", return_value=started),
        mock.patch.object(dist, "get_backend", return_value=platform.WORLD),
        mock.patch.object(torch.cuda, "current_device", return_value=1),
    ):
        assert platform.current_device() == torch.device("cuda", index)


def test_a_process_alone_starts_without_a_launcher() -> None:
    with process_with(A, B) as started:
        distributed.init_default_group()
    assert (started["backend"], started["device"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))
    assert (started["rank"], started["world_size"], started["device_id"]) == (0, 1, None)


@pytest.mark.parametrize(
    ("configured", "backend"),
    [
        ("cuda:nccl", platform.NCCL),
        ("cpu:gloo,cuda:nccl", platform.NCCL),
        ("cpu:gloo,cuda:gloo", platform.GLOO),
        ("cpu:gloo,cuda:gloo,xpu:gloo", platform.GLOO),
    ],
)
def test_groups_of_an_engine_follow_the_default_group(configured: str, backend: str) -> None:
    with mock.patch.object(dist, "get_backend_config", return_value=configured):
        assert platform.collective_backend() == backend


def test_groups_of_tensors_are_of_nccl_alone_and_the_control_plane_of_gloo() -> None:
    """With gloo, each axis over all ranks would connect every process to every other one."""
    axes: dict[str, Any] = {}
    groups: list[Any] = []

    def new_group(ranks: Any = None, backend: Any = None, **options: Any) -> None:
        groups.append((ranks, backend))
        raise InterruptedError

    with (
        mock.patch.object(dist, "get_backend_config", return_value=platform.WORLD),
        mock.patch.object(dist, "get_world_size", return_value=8),
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(mesh, "DeviceMesh", lambda *_, **options: axes.update(options)),
        mock.patch.object(dist, "new_group", new_group),
    ):
        mesh.build_batch_mesh(ParallelDims.parse("fsdp:d2c2t2"), "cuda", GroupSet())
        with pytest.raises(InterruptedError):
            distributed.ControlPlane()
        assert {backend for backend, _ in axes["backend_override"]} == {"cuda:nccl"}
        assert groups == [(None, "gloo")]
        megatron = pytest.importorskip("areal.engine.megatron.process_groups")
        with pytest.raises(InterruptedError):
            megatron.ProcessGroups(ParallelDims.parse("megatron:d2c2t2"), GroupSet())
    assert {backend for _, backend in groups[1:]} == {"cuda:nccl"}


def test_nccl_groups_of_other_programs_need_separate_gpus() -> None:
    with pytest.raises(ValueError, match=r"ranks 0, 2 use the same GPU, which NCCL does not support: .*LOCAL_RANK"):
        check_separate([A, B, A], platform.NCCL)
    check_separate([A, B, A], platform.GLOO)
    check_separate([A, B, C], platform.NCCL)
    check_separate([None, None], platform.GLOO)
