"""Host memory for offloaded tensors: pinned for a GPU, in blocks that are kept, with asynchronous copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from areal.api import EngineMemory, KindMemory
from areal.utils import offload, platform
from areal.utils.offload import HostMemory

KINDS = {"params": True, "grads": True, "optimizer": True}


@contextmanager
def allocated(block_bytes: int) -> Iterator[list[Tensor]]:
    """Return the buffers that are allocated inside, with small blocks."""
    buffers: list[Tensor] = []

    def allocate(nbytes: int, device: torch.device) -> Tensor:
        buffers.append(torch.full((nbytes,), 255, dtype=torch.uint8))
        return buffers[-1]

    with mock.patch.object(offload, "_BLOCK_BYTES", block_bytes), mock.patch.object(platform, "host_buffer", allocate):
        yield buffers


def memory_of(**tensors: list[Tensor]) -> HostMemory:
    return HostMemory({kind: lambda kind=kind: tensors.get(kind, []) for kind in KINDS})  # type: ignore[misc]


@pytest.mark.parametrize("block_bytes", [512, 1024, 1 << 20])
def test_tensors_of_any_size_are_restored_over_several_blocks(block_bytes: int) -> None:
    tensors = [torch.randn(n) for n in (1, 3, 127, 128, 129, 1000, 5)]
    tensors += [torch.randn(7).to(torch.bfloat16), torch.arange(11, dtype=torch.uint8)]
    expected = [x.clone() for x in tensors]
    memory = memory_of(params=tensors[:4], optimizer=tensors[4:])
    with allocated(block_bytes) as buffers:
        for _ in range(2):
            assert memory.offload(**KINDS) == sum(x.nbytes for x in expected)
            assert all(x.untyped_storage().nbytes() == 0 for x in tensors)
            assert memory.onload(**KINDS) == sum(x.nbytes for x in expected)
            assert all(map(torch.equal, tensors, expected))
        count = len(buffers)
        # The buffers of a kind that is offloaded are not used for another one.
        memory.offload(**{**KINDS, "optimizer": False})
        memory.offload(**{**KINDS, "params": False})
        memory.onload(**KINDS)
        assert all(map(torch.equal, tensors, expected))
    assert len(buffers) == count
    assert all(len(buffer) <= block_bytes and len(buffer).bit_count() == 1 for buffer in buffers)
    assert sum(map(len, buffers)) < 4 * sum(x.nbytes + 512 for x in expected)


def test_more_tensors_get_more_memory_and_keep_that_of_the_last_call() -> None:
    tensors = [torch.randn(100)]
    memory = memory_of(grads=tensors)
    with allocated(1024) as buffers:
        memory.offload(**KINDS)
        memory.onload(**KINDS)
        first = buffers[0].data_ptr()
        tensors.append(torch.randn(600))
        expected = [x.clone() for x in tensors]
        memory.offload(**KINDS)
        memory.onload(**KINDS)
    assert buffers[0].data_ptr() == first
    assert len(buffers) > 1
    assert all(map(torch.equal, tensors, expected))


def test_storage_of_two_kinds_is_moved_once() -> None:
    both, other = torch.randn(10), torch.randn(5)
    expected = both.clone()
    memory = memory_of(params=[both], optimizer=[both.view(2, 5), other])
    assert memory.offload(**KINDS) == both.nbytes + other.nbytes
    assert memory.onload(**KINDS) == both.nbytes + other.nbytes
    assert torch.equal(both, expected)


def test_report_counts_each_storage_once_and_on_the_right_side() -> None:
    both, other = torch.randn(10), torch.randn(5)
    memory = memory_of(params=[both], optimizer=[both.view(2, 5), other])
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert memory.report(cpu) == EngineMemory(params=KindMemory(40), optimizer=KindMemory(20))
    # Shards that stay in host memory by cpu_offload.
    assert memory.report(gpu) == EngineMemory(params=KindMemory(offloaded=40), optimizer=KindMemory(offloaded=20))
    memory.offload(**{**KINDS, "optimizer": False})
    assert memory.report(cpu) == EngineMemory(params=KindMemory(offloaded=40), optimizer=KindMemory(20))
    with mock.patch.object(platform, "synchronize", side_effect=AssertionError):
        assert memory.report(cpu).on_device == 20


def test_error_while_memory_is_allocated_leaves_all_tensors_in_place() -> None:
    tensors = [torch.randn(10), torch.randn(10)]
    expected = [x.clone() for x in tensors]
    memory = memory_of(params=tensors[:1], optimizer=tensors[1:])
    answers: list[Any] = [torch.empty(512, dtype=torch.uint8), RuntimeError("host memory is used up")]
    with (
        mock.patch.object(platform, "host_buffer", side_effect=answers),
        pytest.raises(RuntimeError, match="used up"),
    ):
        memory.offload(**KINDS)
    assert memory.onload(**KINDS) == 0
    assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize(("device", "pinned"), [("cuda", True), ("cpu", False)])
def test_buffers_for_a_gpu_are_pinned(device: str, pinned: bool) -> None:
    with mock.patch("torch.empty") as empty:
        platform.host_buffer(8, torch.device(device))
    empty.assert_called_once_with(8, dtype=torch.uint8, pin_memory=pinned)
