"""The actor of a rank: a process with the objects of its calls, which replies questions on its state while it works."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
from ray import ObjectRef
from torch.distributed import TCPStore

from areal.dispatch.executor import Handle, RankObjects, Reply, reply_to
from areal.dispatch.ray.results import seal, unpickle_work
from areal.dispatch.wire import Packed
from areal.utils.distributed import enter_world, leave_world
from areal.utils.platform import gpu_uuids

_MARKERS = (":job_id:", ":actor_name:", ":task_name:")
"""Beginnings of lines that Ray itself writes."""

FRAMES = 4
"""Innermost frames of a position that an error shows."""


@dataclass(frozen=True)
class ProcessInfo:
    """Place and process id of a rank.

    Attributes:
        node: id of the node in Ray.
        address: IP address of the node.
        pid: process id on the node.
        bundle: index of the bundle in the placement group.
        devices: accelerators that the process sees: UUIDs of GPUs, or ids of others that Ray assigned. Empty on a CPU.
        indices: indices on the node of the accelerators that Ray assigned.
        files: files with what the process prints.
    """

    node: str
    address: str
    pid: int
    bundle: int
    devices: tuple[str, ...]
    indices: tuple[int, ...]
    files: tuple[str, ...]

    @property
    def node_name(self) -> str:
        """Return the address of the node and the start of its id: several nodes of a test have one address."""
        return f"{self.address} ({self.node[:8]})"


@dataclass(frozen=True)
class StackPosition:
    """Position of the thread that runs the calls of a process.

    Attributes:
        mark: number that changes when the thread moves.
        stack: innermost frames of the thread; empty between calls.
    """

    mark: int
    stack: str


class RankProcess:
    """Runs calls one after another, and replies :meth:`position` and :meth:`check` while a call runs.

    Args:
        bundle: index of the bundle of the process in the placement group.
        max_result_bytes: size of a result above which it is not sent.
    """

    def __init__(self, bundle: int, max_result_bytes: int) -> None:
        self._bundle, self._max_result_bytes = bundle, max_result_bytes
        self._objects = RankObjects(0, 1)
        self._store: TCPStore | None = None
        self._calls = 0
        # The thread that runs a call: Ray runs them all in one thread, which is not the main one.
        self._thread: int | None = None

    # ---- start

    def process_info(self) -> ProcessInfo:
        """Return the place of this process."""
        context = ray.get_runtime_context()
        assigned = {kind: ids for kind, ids in context.get_accelerator_ids().items() if ids}
        others = tuple(f"{kind} {number}" for kind, ids in sorted(assigned.items()) for number in ids)
        return ProcessInfo(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            self._bundle,
            gpu_uuids() or others,
            tuple(int(number) for ids in assigned.values() for number in ids if str(number).isdigit()),
            printed_to(),
        )

    def open_store(self, port: int) -> int:
        """Open the rendezvous store of all ranks, and keep it open. Returns its port.

        Args:
            port: port to listen on; 0 takes a free one.
        """
        self._store = None  # that of an earlier world, which may have the port
        self._store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
        return self._store.port

    def enter(self, rank: int, size: int, local: tuple[int, int], address: str, port: int) -> None:
        """Make this process a rank of a world.

        Args:
            rank, size: rank of the process, and number of ranks.
            local: rank among the processes of the node that see the same devices, and their number.
            address, port: address of the rendezvous store.
        """
        enter_world(rank, size, local, address, port)
        self._objects = RankObjects(rank, size)

    def leave(self) -> None:
        """Empty this process, and leave the world. It can enter another one."""
        self._objects.clear()
        leave_world()

    # ---- calls

    def run(self, what: str, pickled: bytes, argument: Any, refs: Sequence[ObjectRef]) -> Reply:
        """Run a call. An error in it, or in sending its result, becomes part of the reply.

        Args:
            what: name of the call, for errors.
            pickled: work of the call, pickled once for all ranks.
            argument: of this rank.
            refs: references of the work.
        """
        self._calls, self._thread = self._calls + 1, threading.get_ident()

        def sealed(objects: RankObjects, value: Any) -> Packed:
            work = unpickle_work(pickled, refs)
            return seal(work(objects, value), f"the result of {what} on rank {objects.rank}", self._max_result_bytes)

        try:
            return reply_to(sealed, self._objects, argument)
        finally:
            self._thread = None

    # ---- questions, answered while a call runs

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never return: the reply fails when the process ends."""
        threading.Event().wait()

    @ray.method(concurrency_group="health")
    def position(self) -> StackPosition:
        """Return the position of the thread that runs calls."""
        thread, calls = self._thread, self._calls
        frame = sys._current_frames().get(thread) if thread is not None else None
        if frame is None:
            return StackPosition(hash((calls, "idle")), "")
        return StackPosition(hash((calls, *_steps(frame))), "".join(traceback.format_stack(frame)[-FRAMES:]).rstrip())

    @ray.method(concurrency_group="health")
    def check(self, function: Handle) -> str:
        """Load a function that was shipped. Returns the error, or an empty string."""
        try:
            function.get()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @ray.method(concurrency_group="health")
    def last_lines(self, files: tuple[str, ...]) -> str:
        """Return the last lines that another process of this node has printed."""
        return last_lines(files)


def _steps(frame: FrameType | None) -> list[tuple[int, int]]:
    """Return the code object and the instruction of each frame of a stack."""
    steps = []
    while frame is not None:
        steps.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return steps


def printed_to() -> tuple[str, ...]:
    """Return the files that this process prints to: standard output and error. Empty if they are not files."""
    try:
        files = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
    except OSError:
        return ()
    return tuple(file for file in files if os.path.isfile(file))


def last_lines(files: tuple[str, ...], lines: int = 20, nbytes: int = 2**16) -> str:
    """Return the last lines of files, and nothing of those that cannot be read."""
    texts = []
    for file in files:
        try:
            with open(file, "rb") as handle:
                handle.seek(max(0, os.path.getsize(file) - nbytes))
                printed = handle.read().decode(errors="replace").splitlines()
                texts.append("\n".join([line for line in printed if not line.startswith(_MARKERS)][-lines:]))
        except OSError:
            continue
    return "\n".join(text for text in texts if text)
