"""Measurements of the machine: time, memory, and the rate of a matrix product."""

from __future__ import annotations

import gc
import os
import platform
import time
from pathlib import Path

import torch

from areal.utils.profiling import host_memory


def memory_mb(peak: bool = False) -> float:
    """Return the resident memory of this process in MB (2**20 bytes), now or the peak since its reset; NaN without ``/proc``."""
    nbytes = host_memory.resident_bytes(peak=peak)
    return float("nan") if nbytes is None else nbytes / 2**20


def give_back() -> None:
    """Return free memory to the system, so that the next row can use it; no effect if libc cannot."""
    gc.collect()
    host_memory.trim()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stay_on_core(rank: int) -> None:
    """Keep this process, and threads that it starts from now on, on one core, another one for each rank; no effect if the system cannot.

    XLA has no other setting for one thread.
    """
    if hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {available[rank % len(available)]})


def cpu_name() -> str:
    """Return the name that the CPU has for the system, with its widest vectors, such as ``AMD EPYC (AVX2)``."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def gemm_rate(dtype: torch.dtype, n: int = 1024, times: int = 5) -> float:
    """Return the FLOP per CPU-second of a product of two ``[n, n]`` matrices, the best of ``times``."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    seconds = []
    for _ in range(times):
        start = time.process_time()
        torch.mm(a, b)
        seconds.append(time.process_time() - start)
    return 2 * n**3 / min(seconds)
