"""Runs world tests under torchrun: every rank is a pytest that calls the functions itself, and the ranks agree on each outcome."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class TestTimeout(Exception):
    """A world test took longer than it may."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test on one rank: ``passed``, ``failed`` or ``skipped``, and its message."""

    status: str
    text: str = ""


class TorchrunWorld:
    """The process group of a session that torchrun started.

    Ranks exchange outcomes through the store of the rendezvous, not through the process group, which a failing test may leave
    out of step.
    """

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank, local_size = (
            int(os.environ.get("LOCAL_RANK", self.rank)),
            int(os.environ.get("LOCAL_WORLD_SIZE", self.size)),
        )
        if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fewer GPUs than ranks: everything on the CPU
            self.device = torch.device("cpu")
        torch.set_num_threads(1)
        self._store, _, _ = next(iter(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT)))
        self._generation = self._questions = 0
        self._join()

    def _join(self) -> None:
        store = dist.PrefixStore(f"world/{self._generation}", self._store)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=COLLECTIVE_TIMEOUT)

    def rejoin(self) -> None:
        """Start a new process group in place of one whose collectives may be out of step. Every rank calls it."""
        self._generation += 1
        if dist.is_initialized():
            dist.destroy_process_group()
        self._join()

    def gather(self, value: Any, timeout: float) -> list[Any]:
        """Return the value of each rank, by rank. Collective."""
        keys = [f"asked/{self._questions}/{rank}" for rank in range(self.size)]
        self._questions += 1
        self._store.set(keys[self.rank], pickle.dumps(value))
        self._store.wait(keys, timedelta(seconds=timeout))
        return [pickle.loads(self._store.get(key)) for key in keys]

    def leave(self) -> None:
        """Wait until every rank is done (rank 0 may hold the store), and end the process group."""
        self.gather(None, timeout=60.0)
        if dist.is_initialized():
            dist.destroy_process_group()
        time.sleep(0.2)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TestTimeout` in the main thread after so many seconds. Keeps an alarm that was set before."""

    def expire(signum: int, frame: FrameType | None) -> None:
        raise TestTimeout(f"the test took longer than {seconds:g} s on this rank")

    before = signal.signal(signal.SIGALRM, expire)
    start = time.monotonic()
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(0.1, remaining - (time.monotonic() - start)), interval)
