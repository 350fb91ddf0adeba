"""Functions that tests run on the ranks."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from areal.dispatch.executor import PendingCall, RankObjects
from areal.tests.harness.programs import compile_once_in_a_world
from areal.utils.distributed import init_default_group


def run(workers: Any, work: Any, arguments: list[Any] | None = None, what: str = "a call") -> list[Any]:
    """Run a function on all ranks, and return the values of all ranks."""
    return start(workers, work, arguments, what).result(60.0)


def start(workers: Any, work: Any, arguments: list[Any] | None = None, what: str = "a call") -> PendingCall[list[Any]]:
    return PendingCall(workers.start(what, work, arguments or [None] * workers.size), list)


def rank_and_size(rank_objects: RankObjects, _: Any) -> tuple[int, int]:
    return rank_objects.rank, rank_objects.size


def environment(rank_objects: RankObjects, _: Any) -> dict[str, str]:
    return dict(os.environ)


def compile_once(rank_objects: RankObjects, _: Any) -> None:
    """Let one rank compile what JAX runs on both."""
    importlib.import_module("jax")
    compile_once_in_a_world()


def all_reduce(rank_objects: RankObjects, value: float) -> float:
    """Sum a value over all ranks by a collective of the default group."""
    init_default_group()
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


def get(rank_objects: RankObjects, handle: Any) -> Any:
    """Return a value that was stored."""
    return handle.get()


def write_on_rank_0(rank_objects: RankObjects, handle: Any) -> list[float]:
    """Write into a batch on one rank: into its tensor, a tensor on its array, and the array. Returns the start of the array."""
    init_default_group()
    batch = handle.get()
    array = batch["meta"]["object"].array
    if rank_objects.rank == 0:
        batch["input_ids"].fill_(1)
        torch.from_numpy(array)[:2] = 1.0
    dist.barrier()
    if rank_objects.rank == 0:
        array[2] = 1.0
    return array[:3].tolist()


def call(rank_objects: RankObjects, handle: Any) -> Any:
    """Call a function that was shipped."""
    return handle.get()(rank_objects)


def call_shared(handle: Any, rank_objects: RankObjects, _: Any) -> Any:
    """The same, for a function that is part of the work of all ranks, as in :class:`~areal.dispatch.calls.Calls`."""
    return handle.get()(rank_objects)


def note(rank_objects: RankObjects, token: int) -> None:
    """Add to the list of calls of this rank."""
    rank_objects.by_name.setdefault("tokens", []).append(token)


def noted(rank_objects: RankObjects, _: Any) -> list[int]:
    """Return the list of calls of this rank, and clear it."""
    return rank_objects.by_name.pop("tokens", [])


def fail_on_rank_1(rank_objects: RankObjects, kind: type[Exception]) -> str:
    if rank_objects.rank == 1:
        raise kind("a bad value")
    return "fine"


def zeros(rank_objects: RankObjects, sizes: list[int]) -> torch.Tensor:
    """Return a tensor of so many bytes."""
    return torch.zeros(sizes[rank_objects.rank], dtype=torch.uint8)


def oversleep(rank_objects: RankObjects, late: int) -> None:
    """Sleep on one rank, while the others wait for it in a collective."""
    init_default_group()
    print(f"rank {rank_objects.rank} begins", flush=True)
    if rank_objects.rank == late:
        time.sleep(600)
    dist.barrier()


def wait_until_ended(pids: list[int], seconds: float = 60.0) -> None:
    """Wait until processes of this machine have ended."""
    limit = time.monotonic() + seconds
    while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < limit, f"processes {alive} still run"
        time.sleep(0.05)
