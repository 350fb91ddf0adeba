"""Devices: the only module that distinguishes GPUs from CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.profiler import ProfilerActivity


def accelerator() -> str:
    """Return ``"cuda"`` if there is a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device() -> torch.device:
    """Return the device of this process: the GPU of its local rank, which several processes may use, or the CPU."""
    if accelerator() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def collective_backend() -> str:
    """Return the backend of the default process group: gloo for CPU tensors, NCCL for GPU tensors if possible."""
    # NCCL needs a separate GPU for each local rank.
    if accelerator() == "cpu":
        return "gloo"
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    return "gloo" if shared else "cpu:gloo,cuda:nccl"


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """Return the dtype with the fastest matrix products: bfloat16 on GPUs and CPUs with bfloat16 instructions, else float32."""
    if accelerator() != "cpu":
        return "bfloat16"
    # Without such instructions, bfloat16 is several times slower than float32.
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bfloat16" if any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")) else "float32"


def set_device(device: torch.device) -> None:
    """Make ``device`` the current GPU. Does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def empty_cache(device: torch.device) -> None:
    """Release the allocator's unused memory to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def is_device_lost(error: BaseException | None) -> bool:
    """Return whether an error leaves the device unusable for this process: an illegal access, a failed assertion in a kernel, broken memory.

    Every later call to the device raises the same error, until the process is restarted.
    """
    while error is not None:
        if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
            return True
        error = error.__cause__
    return False


# ---- time and memory of a device


class Stopwatch(Protocol):
    """Measures the time between marks in the execution of a device."""

    def mark(self) -> Any:
        """Set a mark at this point of the execution."""

    def laps(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds between each mark and the next."""


def stopwatch(device: torch.device) -> Stopwatch:
    """Return a stopwatch for work on ``device``, in its current stream."""
    return _StreamStopwatch(device) if device.type == "cuda" else _HostStopwatch()


class _HostStopwatch:
    """Stopwatch of a CPU: execution is synchronous, so that the host's clock is exact."""

    def mark(self) -> float:
        return time.perf_counter()

    def laps(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]


class _StreamStopwatch:
    """Stopwatch of a GPU: marks are events in a stream. The host waits only in :meth:`laps`.

    All marks are in the stream that is current when the stopwatch is created. Work in other streams counts while this stream
    waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def laps(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()  # elapsed_time() needs completed events, and returns milliseconds
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities to record in a profile of work on ``device``."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def profiled_memory(device: torch.device) -> tuple[int, int]:
    """Return the number of the device type in a profiler's memory events, and the bytes allocated now (0 on a CPU: unknown)."""
    return (1, torch.cuda.memory_allocated(device)) if device.type == "cuda" else (0, 0)


def start_memory_history(device: torch.device) -> None:
    """Start to record each allocation with its stack. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(device=device)


def save_memory_history(device: torch.device, path: Path) -> None:
    """Write the recorded allocations for https://pytorch.org/memory_viz, and stop recording."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
