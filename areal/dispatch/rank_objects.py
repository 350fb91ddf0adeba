"""The process of a rank: the objects that it holds, and the reply to a call."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from areal.api import TrainEngine
from areal.utils.distributed import EngineLostError, RankLostError

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
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.by_name: dict[str, Any] = {}

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
    """

    value: Any = None
    kind: str = ""
    text: str = ""
    trace: str = ""
    error: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors do not always survive a pickle; their text does.
        return Reply, (self.value, self.kind, self.text, self.trace)


def reply_to(work: Callable[[RankObjects, Any], Any], rank_objects: RankObjects, argument: Any) -> Reply:
    """Call a function on this rank. An error becomes part of the reply."""
    try:
        return Reply(work(rank_objects, argument))
    except Exception as error:
        kind = type(error).__name__
        text = str(error) if kind in KINDS else f"{kind}: {error}"
        return Reply(None, kind if kind in KINDS else "RuntimeError", text, traceback.format_exc(), error)
