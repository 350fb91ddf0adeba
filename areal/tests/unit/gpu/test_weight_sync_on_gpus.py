"""Weight transports on GPUs: handles of another process's numbering, and communicators that are made under a timeout."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from areal.tests.harness.limits import promptly
from areal.tests.harness.processes import needs_own_world
from areal.tests.unit.weight_sync.transports import control, filled, receiver_of, receiving, socket_dir, transport_to  # noqa: F401
from areal.utils import platform
from areal.utils.distributed import ControlPlane
from areal.weight_sync import ModuleSource, broadcast, ipc

pytestmark = needs_own_world

A, B, C = "GPU-a", "GPU-b", "GPU-c"
GPU = torch.device("meta")
"""A device other than the CPU, in place of a GPU."""


# ---- CUDA IPC


def test_a_handle_gets_the_index_of_the_receiver() -> None:
    """The trainer sees GPU b as the second of its GPUs, and the receiver as the third or the only one."""
    names = reductions.rebuild_cuda_tensor.__code__.co_varnames[: reductions.rebuild_cuda_tensor.__code__.co_argcount]
    args = tuple(1 if name == "storage_device" else name for name in names)
    for visible, index in (((C, A, B), 2), ((B,), 0)):
        own = ipc.with_own_index(reductions.rebuild_cuda_tensor, args, B, visible)
        assert dict(zip(names, own, strict=True)) == {**dict(zip(names, names, strict=True)), "storage_device": index}


@pytest.mark.parametrize(("visible", "said"), [((A, C), "sees GPU-a, GPU-c"), ((), "sees none")])
def test_a_handle_of_an_invisible_gpu_is_refused(visible: tuple[str, ...], said: str) -> None:
    with pytest.raises(
        ValueError, match=rf"device = 'cuda': .* GPU GPU-b, and this receiver {said}: .*CUDA_VISIBLE_DEVICES"
    ):
        ipc.with_own_index(reductions.rebuild_cuda_tensor, (0,) * 15, B, visible)


def open_handle(storage_device: int, nbytes: int) -> torch.Tensor:
    """Open a handle of no memory: the result has the index of its device as value."""
    return torch.full((nbytes,), storage_device, dtype=torch.uint8)


def test_the_uuid_of_the_trainers_gpu_is_sent_with_the_handles() -> None:
    near, far = (SimpleNamespace(pipe=end) for end in Pipe())
    with mock.patch.object(ipc, "reduce_tensor", lambda buffer: (open_handle, (1, len(buffer)))):
        memory = ipc._DeviceMemory(8, torch.device("cpu"))
        with mock.patch.object(platform, "gpu_uuid", return_value=B):
            memory.send_to(near)  # type: ignore[arg-type]
    with mock.patch.object(platform, "gpu_uuids", return_value=(C, A, B)):
        buffers = ipc._map_device_memory(far, 8)  # type: ignore[arg-type]
    assert [buffer.tolist() for buffer in buffers] == [[2] * 8] * 2


def test_the_trainer_names_a_receiver_that_refuses_its_memory(socket_dir: Path, control: ControlPlane) -> None:  # noqa: F811
    right = ipc._OPENERS["host"]

    def refuse(*args: Any) -> Any:
        right(*args)
        raise ValueError("this receiver does not see the GPU")

    transport, module = transport_to("ipc", socket_dir, control), filled(0)
    receiver = receiver_of("ipc", socket_dir, module)
    with mock.patch.dict(ipc._OPENERS, {"host": refuse}):
        thread, _ = receiving(receiver)
        with pytest.raises(RuntimeError, match=r"receiver .* cannot go on: .*this receiver does not see the GPU"):
            transport.send(ModuleSource(filled(1)), 1)
    transport.close()
    thread.join(20)
    receiver.close()


# ---- NCCL


def test_open_connects_all_members(socket_dir: Path, control: ControlPlane) -> None:  # noqa: F811
    """Both ends perform one collective before the transport is open: it makes NCCL's communicator."""
    events: list[str] = []

    def counted(group: Any, data: torch.Tensor) -> Any:
        events.append(f"broadcast {len(data)}")
        return right(group, data)

    right = broadcast._broadcast
    with mock.patch.object(broadcast, "_broadcast", counted):
        transport = transport_to("broadcast", socket_dir, control, observe=events.append)
        receiver = receiver_of("broadcast", socket_dir, filled(0))
        thread, _ = receiving(receiver)
        transport.send(ModuleSource(filled(1)), 1)
        thread.join(20)
        transport.close()
        receiver.close()
    assert events[: events.index("open")] == ["ready", "broadcast 1", "broadcast 1"]


class Communicator:
    """``ProcessGroupNCCL`` whose members never connect: a collective blocks the host."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)
            self._timeout: Any = None

    made: list[Communicator]

    def __init__(self, store: dist.Store, rank: int, size: int, options: Communicator.Options) -> None:
        self.options, self.aborted = options, threading.Event()
        Communicator.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.aborted.wait(60)
        raise RuntimeError("the communicator was aborted")

    def abort(self) -> None:
        self.aborted.set()


def join_group(uuids: list[str], timeout: float) -> list[Any]:
    """Let each member of a group on these GPUs join it. Returns its group or its error."""
    store, results = dist.HashStore(), [None] * len(uuids)
    uuid_of_thread = {}

    def join(rank: int) -> None:
        uuid_of_thread[threading.get_ident()] = uuids[rank]
        try:
            results[rank] = broadcast._group(store, rank, len(uuids), GPU, timeout)
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    def uuid_here(device: torch.device) -> str:
        return uuid_of_thread[threading.get_ident()]

    Communicator.made = []
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", Communicator, create=True),
        mock.patch.object(platform, "gpu_uuid", uuid_here),
    ):
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(uuids))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    return results


def test_a_communicator_that_does_not_connect_is_aborted_in_time() -> None:
    with promptly():
        errors = join_group([A, B], timeout=0.5)
    assert [type(error) for error in errors] == [TimeoutError, TimeoutError]
    assert "not connected within 0.5 s" in str(errors[0])
    assert [made.aborted.is_set() for made in Communicator.made] == [True, True]
    assert {(made.options.config.blocking, made.options._timeout.total_seconds()) for made in Communicator.made} == {
        (0, 0.5)
    }


@pytest.mark.parametrize(
    ("uuids", "said"),
    [([A, A], "the trainer and receiver "), ([A, B, B], "device = 'cuda': receiver ")],
    ids=["trainer and receiver", "two receivers"],
)
def test_members_on_one_gpu_are_refused_over_nccl(uuids: list[str], said: str) -> None:
    errors = join_group(uuids, timeout=5.0)
    assert [type(error) for error in errors] == [ValueError] * len(uuids)
    assert said in str(errors[0])
    assert "use the same GPU, which NCCL does not support: use SharedMemoryTransport(device='cuda')" in str(errors[0])
    assert Communicator.made == []
