"""The only place that knows a GPU from a CPU."""

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
    """``"cuda"`` where there is a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device() -> torch.device:
    """The device of this process: the GPU of its local rank (several processes may share one), or the CPU."""
    if accelerator() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def collective_backend() -> str:
    """Backend of the default process group: gloo, and NCCL for tensors on GPUs where each local rank has one of its own."""
    if accelerator() == "cpu":
        return "gloo"
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    return "gloo" if shared else "cpu:gloo,cuda:nccl"


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """The dtype in which this machine multiplies matrices fastest: bfloat16 on GPUs and on processors that have instructions for it, and
    float32 elsewhere, where bfloat16 is several times slower.
    """
    if accelerator() != "cpu":
        return "bfloat16"
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bfloat16" if any(known.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")) else "float32"


def set_device(device: torch.device) -> None:
    """Make ``device`` the current one, where devices have an index."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def empty_cache(device: torch.device) -> None:
    """Return freed memory to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host's allocator, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


# ---- time and memory of a device


class Stopwatch(Protocol):
    """Takes marks in time."""

    def mark(self) -> Any:
        """Here."""

    def laps(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between each mark and the next."""


def stopwatch(device: torch.device) -> Stopwatch:
    """Measures what ``device`` does in its current stream."""
    return _StreamStopwatch(device) if device.type == "cuda" else _HostStopwatch()


class _HostStopwatch:
    """A CPU has done what it was told when the next line runs."""

    def mark(self) -> float:
        return time.perf_counter()

    def laps(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]


class _StreamStopwatch:
    """A GPU comes to a mark when it has done what was asked before it; nobody waits until laps are asked for.

    Marks are in the stream that is current when it is made, whichever is when they are taken: what other streams do counts where that
    one waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def laps(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """What a profile of work on ``device`` looks at."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def profiled_memory(device: torch.device) -> tuple[int, int]:
    """The type of ``device`` by which a profiler's memory events name it, and the bytes that tensors have there now. On a CPU these are not
    known: 0.
    """
    return (1, torch.cuda.memory_allocated(device)) if device.type == "cuda" else (0, 0)


def start_memory_history(device: torch.device) -> None:
    """Note each allocation with its stack, where the allocator can."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(device=device)


def save_memory_history(device: torch.device, path: Path) -> None:
    """Write what was noted, for https://pytorch.org/memory_viz, and note no more."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
