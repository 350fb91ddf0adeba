"""Time, memory, matrix products and idle time of the compute device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import profile

from areal.utils import platform


def finish(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Return the wall seconds of each of ``rounds`` calls, after one warm-up call."""
    result = []
    for _ in range(rounds + 1):
        finish(device)
        start = time.perf_counter()
        work()
        finish(device)
        result.append(time.perf_counter() - start)
    return result[1:]


def matmul_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Return the FLOP per second of a product of two ``[n, n]`` matrices: the median of 20."""
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / statistics.median(seconds(lambda: torch.mm(a, b), device, 20))


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory allocated by ``work`` on the device, above the memory before; ``None`` on a CPU."""
    if device.type != "cuda":
        work()
        return None
    finish(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    finish(device)
    return torch.cuda.max_memory_allocated(device) - before


def idle_share(work: Callable[[], object], device: torch.device) -> float | None:
    """Return the fraction of a call without a running kernel, from its first kernel to its last; ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    with profile(activities=platform.profiler_activities(device)) as profiler:
        work()
        finish(device)
    return idle(kernel_spans(profiler.events()))


def kernel_spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Return the start and end of the kernels and copies among a profiler's events.

    User annotations, with which FSDP and optimizers mark their phases, are events of the device too. They cover the
    gaps between the kernels of a phase.
    """
    on_device = (event for event in events if event.device_type == torch.autograd.DeviceType.CUDA)
    return [(event.time_range.start, event.time_range.end) for event in on_device if not event.is_user_annotation]


def idle(spans: Iterable[tuple[float, float]]) -> float:
    """Return the fraction of time, from the first begin to the last end, that no span covers."""
    ordered = sorted(spans)
    if not ordered:
        return 1.0
    begin, covered, until = ordered[0][0], 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1.0 - covered / (until - begin) if until > begin else 0.0
