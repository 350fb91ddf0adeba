"""What this machine does: seconds, memory, and the rate of a matrix product."""

from __future__ import annotations

import ctypes
import gc
import time
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR, _MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")


def memory_mb(peak: bool = False) -> float:
    """Resident memory of this process in MB (2**20 bytes), now or at most since :func:`forget_peak`; NaN where there is no ``/proc``."""
    return _megabytes(_STATUS, "VmHWM:" if peak else "VmRSS:")


def available_mb() -> float:
    """Memory of this machine that processes could still take, in MB; NaN where there is no ``/proc``."""
    return _megabytes(_MACHINE, "MemAvailable:")


def _megabytes(file: Path, field: str) -> float:
    if not file.exists():
        return float("nan")
    return next(int(line.split()[1]) / 1024 for line in file.read_text().splitlines() if line.startswith(field))


def forget_peak() -> None:
    """Let the high-water mark begin again at what is resident now; where that is not allowed, it stays."""
    with suppress(OSError):
        _CLEAR.write_text("5")


def give_back() -> None:
    """Hand memory that is free back to the system, so that rows which wait leave it to the one whose turn it is; nothing where libc cannot."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def gemm_rate(dtype: torch.dtype, n: int = 1024, times: int = 5) -> float:
    """FLOP per CPU-second of a product of two ``[n, n]`` matrices, the best of ``times``."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    seconds = []
    for _ in range(times):
        start = time.process_time()
        torch.mm(a, b)
        seconds.append(time.process_time() - start)
    return 2 * n**3 / min(seconds)
