"""The protocol between a handle and the processes that run its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from areal.dispatch.rank_objects import Handle, RankObjects, Reply

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
    """

    size: int
    generation: int
    in_driver: bool

    @property
    def nodes(self) -> tuple[str, ...]: ...

    @property
    def lost(self) -> Exception | None: ...

    def put(self, value: Any) -> Handle:
        """Store a batch for the ranks that get its handle: once, however many they are. The value is not modified on any rank.

        Raises:
            ValueError: the batch cannot be sent.
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
