"""A world of fresh processes for one call: for tests that kill ranks, or that pass something from one world size to another."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from areal.tests.harness.pool import PRELOADED
from areal.tests.harness.world import World, enter, world

needs_own_world = pytest.mark.own_world
"""For tests that call :func:`run_world`."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (negative for a signal), and what it printed."""

    code: int
    output: str


def run_world(size: int, target: Callable[..., None], *args: Any, timeout: float = 90.0) -> list[Ended]:
    """Call a module's function on every rank of a new gloo world. A rank that raises ends with code 1, its traceback printed.

    Raises:
        TimeoutError: some rank was still running; all were killed. The message holds what they printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    scratch = world().cache / f"processes-{os.getpid()}-{time.monotonic_ns()}"
    scratch.mkdir()
    logs = [scratch / f"rank{rank}.log" for rank in range(size)]
    processes = [
        context.Process(target=_serve, args=(rank, size, store.port, world().cache, log, target, args), daemon=True)
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    outputs = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    if late:
        raise TimeoutError(f"ranks {late} of {size} still ran after {timeout:g} s\n" + "\n".join(outputs))
    return [Ended(process.exitcode or 0, output) for process, output in zip(processes, outputs, strict=True)]


def succeed(size: int, target: Callable[..., None], *args: Any, timeout: float = 90.0) -> None:
    """:func:`run_world`, where every rank must end well."""
    ended = run_world(size, target, *args, timeout=timeout)
    assert all(rank.code == 0 for rank in ended), "\n".join(
        f"rank {i}: {e.code}\n{e.output}" for i, e in enumerate(ended)
    )


def _serve(
    rank: int, size: int, port: int, cache: Path, log: Path, target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    enter(World(rank, size, cache))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    target(*args)
    sys.stdout.flush()
    os._exit(0)
