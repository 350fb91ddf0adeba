"""The world of ranks that a test runs in: in pytest itself, in a worker of the pool, or under torchrun."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """The ranks that run a test.

    Attributes:
        rank, size: of the default process group.
        cache: a directory that all ranks and all sessions of a run share, empty at the start.
        records: what tests have recorded since they were last taken; see :func:`record`.
    """

    rank: int
    size: int
    cache: Path
    records: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


_current: World | None = None


def world() -> World:
    """The world of this process; a world of one where none was entered."""
    if _current is None:
        scratch = tempfile.mkdtemp(prefix="areal-tests-")
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        return enter(World(0, 1, Path(scratch)))
    return _current


def enter(new: World) -> World:
    """Set the world of this process. Called once, when the process starts."""
    global _current
    _current = new
    return new


def record(table: str, row: str, **columns: Any) -> None:
    """Add a row to a table that pytest prints at the end of the session."""
    world().records.append((table, row, {name: str(value) for name, value in columns.items()}))


def take_records() -> list[tuple[str, str, dict[str, str]]]:
    """Return the rows recorded since the last call."""
    taken = list(world().records)
    world().records.clear()
    return taken


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock over all processes of this machine, in a file next to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def cached(kind: str, key: Any, make: Callable[[], Any]) -> Any:
    """Return the result of ``make()``, computed by the first process that needs it and read from a file by all others.

    Args:
        kind: a word for the file's name.
        key: any value that identifies the result; its ``repr`` must be the same in every process.
        make: returns something that ``torch.save`` can write.
    """
    path = world().cache / f"{kind}-{digest(key)}.pt"
    with locked(path):
        if not path.exists():
            partial = path.with_suffix(".partial")
            torch.save(make(), partial)
            partial.rename(path)
    return torch.load(path, weights_only=False)


def digest(key: Any) -> str:
    """A short name for ``repr(key)``."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


@contextmanager
def no_world() -> Iterator[None]:
    """Context of tests that need a process without a process group: skipped under torchrun. One that another test has left is destroyed."""
    if "WORLD_SIZE" in os.environ:
        pytest.skip("needs a process without a process group")
    if dist.is_initialized():
        dist.destroy_process_group()
    yield


@contextmanager
def one_rank() -> Iterator[None]:
    """Context of tests that start engines of one rank in pytest itself: skipped under torchrun, and no process group remains."""
    if "WORLD_SIZE" in os.environ:
        pytest.skip("starts an engine of one rank")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
