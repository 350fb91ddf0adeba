"""Process groups on the CPU that behave like NCCL after a fault: their collectives never raise.

On gloo a collective raises when a peer is gone. On NCCL it stays in the stream: the host goes on with garbage, or waits for the stream until
the group is aborted. These groups pass everything on to gloo until some rank has failed, which the test announces by a file. From then on,
collectives return at once without doing anything, or block the host until ``abort``. Received integers block in both cases: they are shapes,
which the host reads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch.futures import Future

from areal.utils import platform

NAMES = {False: "quiet", True: "blocking"}
"""Names of the backends: collectives that return at once after a fault, and collectives that block the host."""

_POLL = 0.01
_STUCK = 60.0

_fault = Path("/nonexistent")


@contextlib.contextmanager
def quiet_groups(fault: Path, *, blocking: bool) -> Iterator[None]:
    """Create the process groups of engines inside with these backends.

    Args:
        fault: the file that the failing rank creates.
        blocking: collectives block the host after the fault, until they are aborted.
    """
    global _fault
    _fault = fault
    name = NAMES[blocking]
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, _creator(blocking), devices=["cpu"])
    with mock.patch.object(platform, "collective_backend", return_value=name):
        yield


def _creator(blocking: bool) -> Callable[[dist.Store, int, int, timedelta], dist.ProcessGroup]:
    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        # The backend alone lacks some of the methods of a group.
        inner = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return _QuietGroup(inner, blocking)

    return create


class _QuietGroup(dist.ProcessGroup):
    """Passes collectives on to a gloo group until some rank has failed."""

    def __init__(self, inner: dist.ProcessGroup, blocking: bool) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.blocking = inner, blocking
        self.aborted = threading.Event()
        self.pending: set[Future[Any]] = set()

    def start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
        future: Future[Any] = Future()
        self.pending.add(future)
        work = None
        with contextlib.suppress(RuntimeError):
            work = None if self.failed() else getattr(self.inner, name)(*args, **kwargs)
        blocks = self.blocking or (name == "recv" and not args[0][0].is_floating_point())
        threading.Thread(target=self.finish, args=(work, future, blocks), daemon=True).start()
        return _create_work_from_future(future)

    def finish(self, work: Work | None, future: Future[Any], blocks: bool) -> None:
        done = threading.Event()
        if work is not None:
            threading.Thread(target=_wait, args=(work, done), daemon=True).start()
        while not done.wait(_POLL) and not self.failed():
            pass
        if done.is_set() and not self.failed():
            self.pending.discard(future)
            future.set_result(None)
        elif not blocks:
            future.set_result(None)
        elif self.aborted.wait(_STUCK):
            future.set_exception(RuntimeError("communicator was aborted"))
        else:
            future.set_exception(
                AssertionError("a collective waited for a peer that has failed, and was never aborted")
            )

    def failed(self) -> bool:
        """Return whether a peer may be missing in a collective."""
        return self.size() > 1 and _fault.exists()

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        """Wait for pending collectives, as NCCL does."""
        while self.pending and not self.aborted.is_set():
            time.sleep(_POLL)

    def getBackendName(self) -> str:
        return NAMES[self.blocking]

    @property
    def group_name(self) -> str:
        return self.name_in_torch

    def setGroupName(self, name: str) -> None:
        self.name_in_torch = name

    def getGroupName(self) -> str:
        return self.name_in_torch


def _wait(work: Work, done: threading.Event) -> None:
    """Wait for the work of gloo. After an error the work is never done, as on NCCL."""
    with contextlib.suppress(RuntimeError):
        work.wait()
        done.set()


def _passed_on(name: str) -> Callable[..., Work]:
    def collective(self: _QuietGroup, *args: Any, **kwargs: Any) -> Work:
        return self.start(name, args, kwargs)

    return collective


for _name in (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource"),
    *("reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "send"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
):
    setattr(_QuietGroup, _name, _passed_on(_name))
