"""The processes that run ranks: what each holds, its reply to a call, the protocol of all, and one rank in this process."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from areal.api import TrainEngine
from areal.utils.distributed import EngineLostError, RankLostError
from areal.utils.remote_traceback import RemoteTraceback

logger = logging.getLogger(__name__)

KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, RuntimeError, EngineLostError, RankLostError, TimeoutError)
}
"""Errors that keep their type on the way to the driver. Others become ``RuntimeError``."""


class Handle(Protocol):
    """Refers to a value that the ranks can read."""

    def get(self) -> Any:
        """Return the value, in the process of a rank."""
        ...


class RankObjects:
    """The objects of one rank's process.

    Attributes:
        rank, size: rank of the process, and number of ranks.
        by_name: engines by name, and objects that calls keep for later calls, as ``ENGINE/KIND/NUMBER``: micro-batches, streams,
            open contexts.
        owners: key of the group of each engine, by name of the engine.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.by_name: dict[str, Any] = {}
        self.owners: dict[str, str] = {}

    def engine(self, name: str) -> TrainEngine:
        """Return an engine.

        Raises:
            RuntimeError: there is none of this name.
        """
        if name not in self.by_name:
            raise RuntimeError("the engine cannot be used: it is not initialized: call initialize(FinetuneSpec(...))")
        return self.by_name[name]

    def clear(self) -> None:
        """Destroy the engines, and drop everything else."""
        engines = [value for name, value in self.by_name.items() if "/" not in name]
        self.by_name.clear()
        self.owners.clear()
        for engine in engines:
            # The error of a save that is still written is of no use any more.
            try:
                engine.destroy()
            except Exception as error:
                logger.warning("an engine was not destroyed in order: %s", error)


@dataclass(frozen=True)
class Reply:
    """Result of a call on one rank, or its error.

    Attributes:
        value: result.
        kind: name of the error's type; empty without an error.
        text: text of the error.
        trace: traceback of the error in the process of the rank.
        error: the error itself, where it was raised in this process.
        handle: refers to the value, where other processes can read it; ``None`` elsewhere.
    """

    value: Any = None
    kind: str = ""
    text: str = ""
    trace: str = ""
    error: Exception | None = None
    handle: Handle | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors do not always survive a pickle; their text does.
        return Reply, (self.value, self.kind, self.text, self.trace) if self.kind else (self.value,)


def reply_to(work: Callable[[RankObjects, Any], Any], rank_objects: RankObjects, argument: Any) -> Reply:
    """Call a function on this rank. An error becomes part of the reply."""
    try:
        return Reply(work(rank_objects, argument))
    except Exception as error:
        kind = type(error).__name__
        text = str(error) if kind in KINDS else f"{kind}: {error}"
        return Reply(None, kind if kind in KINDS else "RuntimeError", text, traceback.format_exc(), error)


Work = Callable[[RankObjects, Any], Any]
"""Runs in the process of a rank, with the objects that the process holds and the argument of the rank."""


class Executor(Protocol):
    """Processes, one for each rank, that run functions. Several groups may use the same processes.

    Calls reach all ranks in one order, also if several threads of the driver make them.

    Attributes:
        size: number of ranks.
        generation: number of times that the processes were replaced.
        lost: error that has ended the processes, or ``None``.
        nodes: name of the node of each rank.
        in_driver: True if the only rank runs in this process, so that a call to it sends nothing.
        max_result_bytes: bytes of one rank's result above which a call raises an error instead.
    """

    size: int
    generation: int
    in_driver: bool
    max_result_bytes: int

    @property
    def nodes(self) -> tuple[str, ...]: ...

    @property
    def lost(self) -> Exception | None: ...

    def put(self, value: Any, *, keep: bool = False, readers: int = 1) -> Handle:
        """Store a batch for the ranks that get its handle: once, however many they are. The value is not modified on any rank.

        Args:
            value: a batch, a shard or a piece of it.
            keep: many calls get the handle, which is small whatever the size of the value.
            readers: number of ranks that get the handle.

        Raises:
            ValueError: the batch cannot be sent.
        """
        ...

    def share(self, handle: Handle, nbytes: int, references: int, readers: int) -> Handle:
        """Return the handle for a call, or a smaller one that refers to it, if that costs less.

        Args:
            handle: handle that consists of others.
            nbytes: bytes of its pickle without the references.
            references: number of references to the store in it.
            readers: number of ranks that get it.
        """
        ...

    def ship(self, function: Any, what: str) -> Handle:
        """Store a function, or an object with functions, for all ranks. The same function is stored once.

        Args:
            function: any object.
            what: name of the argument, for the error.

        Raises:
            ValueError: the function cannot be sent. Names it and the ways out.
        """
        ...

    def start(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        """Run ``work(rank_objects, arguments[rank])`` on every rank.

        Args:
            what: name of the call, for errors.
            work: function. Its result must be picklable.
            arguments: one for each rank.

        Returns:
            The replies of all ranks, by rank. An error of ``work`` is part of the reply; an error of the future means that the processes are
            lost.

        Raises:
            RuntimeError: the processes are lost or closed.
        """
        ...

    def restart(self, size: int) -> None:
        """Replace the processes by ``size`` others, which hold nothing.

        After a loss, fewer than before may be those that are left, emptied.

        Raises:
            ValueError: the executor cannot have so many. Nothing was changed.
        """
        ...

    def close(self) -> None:
        """End the processes. May be called twice."""
        ...


T = TypeVar("T")


class PendingCall(Generic[T]):
    """Implements :class:`~areal.api.Pending` for a call on all ranks.

    Args:
        replies: replies of all ranks.
        finish: makes the result from the values of all ranks, by rank. Called once, by the first :meth:`result`.
        keep: called with the result, and the handles of the values of all ranks.
    """

    def __init__(
        self,
        replies: Future[list[Reply]],
        finish: Callable[[list[Any]], T],
        keep: Callable[[T, list[Handle | None]], None] | None = None,
    ) -> None:
        self._replies, self._finish, self._keep = replies, finish, keep
        self._lock = threading.Lock()
        self._result: list[T] = []

    def done(self) -> bool:
        return self._replies.done()

    def result(self, timeout: float | None = None) -> T:
        replies = self._replies.result(timeout)
        error = error_of(replies)
        if error is not None:
            raise error
        with self._lock:
            if not self._result:
                result = self._finish([reply.value for reply in replies])
                if self._keep is not None:
                    self._keep(result, [reply.handle for reply in replies])
                self._result.append(result)
        return self._result[0]


def error_of(replies: Sequence[Reply]) -> Exception | None:
    """Return the error of a call, with the remote traceback as its cause; ``None`` if no rank has one.

    An engine raises the same error on all ranks; others get the number of their rank.
    """
    failed = [(rank, reply) for rank, reply in enumerate(replies) if reply.kind]
    if not failed:
        return None
    first = failed[0][1]
    if first.error is not None and len(replies) == 1:
        return first.error
    same = len(failed) == len(replies) and len({(reply.kind, reply.text) for _, reply in failed}) == 1
    text = first.text if same else "; ".join(f"rank {rank}: {reply.text}" for rank, reply in failed)
    kinds = {reply.kind for _, reply in failed}
    error = (KINDS[first.kind] if len(kinds) == 1 else RuntimeError)(text)
    # The longest: on the rank where the error began it also has the cause.
    error.__cause__ = RemoteTraceback(max((reply.trace for _, reply in failed), key=len))
    return error


@dataclass(frozen=True)
class LocalHandle:
    """A value of this process."""

    value: Any

    def get(self) -> Any:
        return self.value


class InProcess:
    """Implements :class:`~areal.dispatch.executor.Executor` for one rank, in the thread that calls."""

    size = 1
    in_driver = True
    max_result_bytes = sys.maxsize
    nodes: tuple[str, ...] = ("",)
    lost: Exception | None = None

    def __init__(self) -> None:
        self.generation = 0
        self._objects = RankObjects(0, 1)

    def put(self, value: Any, *, keep: bool = False, readers: int = 1) -> Handle:
        return LocalHandle(value)

    def share(self, handle: Handle, nbytes: int, references: int, readers: int) -> Handle:
        return handle

    def ship(self, function: Any, what: str) -> Handle:
        return LocalHandle(function)

    def start(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        future: Future[list[Reply]] = Future()
        future.set_result([reply_to(work, self._objects, arguments[0])])
        return future

    def restart(self, size: int) -> None:
        if size != 1:
            raise ValueError(f"a layout of {size} ranks, and this process is one: make a group with RayWorkers({size})")
        self.close()
        self.generation += 1

    def close(self) -> None:
        self._objects.clear()
