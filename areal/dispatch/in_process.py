"""One rank in this process: nothing to install, nothing to send."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from areal.dispatch.executor import Work
from areal.dispatch.rank_objects import Handle, RankObjects, Reply, reply_to


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
    nodes: tuple[str, ...] = ("",)
    lost: Exception | None = None

    def __init__(self) -> None:
        self.generation = 0
        self._objects = RankObjects(0, 1)

    def put(self, value: Any) -> Handle:
        return LocalHandle(value)

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
