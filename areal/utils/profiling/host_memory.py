"""Memory of the host: what this process has of it, and what it can still allocate."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_STATUS, _PEAK, _MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # numbers of glibc's mallopt()

_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.stat"),
    ),
)
"""Files with the limit, the use and its parts of the cgroup that a container sees as its own: of version 2, and of version 1."""


def resident_bytes(*, peak: bool = False) -> int | None:
    """Return the resident bytes of this process, now or the peak since :func:`reset_peak`; ``None`` without ``/proc``."""
    return _bytes_of(_STATUS, "VmHWM:" if peak else "VmRSS:")


def reset_peak() -> None:
    """Reset the peak to the current resident bytes; no effect where the system does not allow it."""
    with contextlib.suppress(OSError):
        _PEAK.write_text("5")


def hold() -> None:
    """Let the C library's allocator keep freed memory until :func:`trim`; no effect if the library cannot."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # Blocks of 1 GiB and more are returned. Versions before 2.35 refuse so large a bound: then no block is.
        if not mallopt(_M_MMAP_THRESHOLD, 2**30):
            mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_ARENA_MAX, 1)  # other threads than the first would get large blocks from the system always


def trim() -> None:
    """Return the free memory of the C library's allocator to the system; no effect if the library cannot."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """Return the bytes that processes can still allocate: of the machine, or of the container if it has a lower limit."""
    # Linux counts caches that it can drop as available.
    free = _bytes_of(_MACHINE, "MemAvailable:")
    if free is None:
        free = total_bytes()
    limits = [_left(*files) for files in _LIMITS]
    return min([free, *(left for left in limits if left is not None)])


def total_bytes() -> int:
    """Return the bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left(limit: Path, used: Path, parts: Path) -> int | None:
    """Return the bytes below the limit of a cgroup, caches of files included; ``None`` without a limit."""
    with contextlib.suppress(OSError, ValueError):
        most = int(limit.read_text())
        caches = [int(line.split()[1]) for line in parts.read_text().splitlines() if line.startswith("inactive_file ")]
        return max(0, most - int(used.read_text()) + sum(caches))
    return None


def _bytes_of(file: Path, field: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None
