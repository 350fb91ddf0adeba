"""The calls of one group: what is sent to its ranks, and what becomes of their answers."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from areal.api import LossObjective, TrainEngineConfig
from areal.api.engine import BatchInput
from areal.dispatch.executor import Executor, Handle, Work
from areal.dispatch.pending import Pending
from areal.dispatch.shards import ShardPlan, plan_shards
from areal.dispatch.works import Drop, Function, Seat, Sent, Verb
from areal.dispatch.table import Returned

T = TypeVar("T")

_NOT_INITIALIZED = "the engine cannot be used: it is not initialized: call initialize(FinetuneSpec(...))"


class Calls:
    """Sends calls to the ranks of one engine.

    Args:
        executor: processes of the ranks.
        name: name of the engine in the processes.
        config: configuration of the engine.

    Attributes:
        seats: place of each rank in the layout; ``None`` before the engine is initialized.
    """

    def __init__(self, executor: Executor, name: str, config: TrainEngineConfig) -> None:
        self.executor, self.name, self.config = executor, name, config
        self.seats: list[Seat] | None = None
        self._numbers = itertools.count()
        # Keys of objects that the driver does not refer to any more. The garbage collector may run in any thread.
        self._unused: list[str] = []
        self._lock = threading.Lock()

    # ---- the primitive

    def start(
        self,
        what: str,
        work: Work,
        finish: Callable[[list[Any]], T],
        arguments: Sequence[Any] | None = None,
    ) -> Pending[T]:
        """Run ``work`` on every rank.

        Args:
            what: name of the call, for errors.
            work: runs in the process of each rank.
            finish: makes the result from the values of all ranks.
            arguments: one for each rank; none by default.
        """
        self._drop_unused()
        nothing = [None] * self.executor.size
        return Pending(self.executor.start(what, work, nothing if arguments is None else arguments), finish)

    def run(self, what: str, work: Work, arguments: Sequence[Any] | None = None) -> list[Any]:
        """Run ``work`` on every rank, and return the values of all ranks."""
        return self.start(what, work, list, arguments).result()

    # ---- what is sent

    def require_seats(self) -> list[Seat]:
        """Return the places of all ranks.

        Raises:
            RuntimeError: the engine is not initialized.
        """
        if self.seats is None:
            raise RuntimeError(_NOT_INITIALIZED)
        return self.seats

    def shards(self, batch: BatchInput) -> tuple[ShardPlan, list[Handle]]:
        """Divide a batch by data-parallel coordinate, and store each shard once. Returns the plan, and the handle of each rank.

        Raises:
            ValueError: the batch is invalid.
        """
        seats = self.require_seats()
        plan = plan_shards(batch, self.config.mb_spec, 1 + max(seat.dp_rank for seat in seats))
        handles = [self.executor.put(shard) for shard in plan.shards]
        return plan, [handles[seat.dp_rank] for seat in seats]

    def verb(self, path: str, arguments: Mapping[str, Any], returned: Returned) -> Verb:
        """Return the work that calls a member of the engine. Functions among the arguments are shipped.

        Raises:
            ValueError: a function cannot be sent.
        """
        shipped = {
            name: Sent(self.executor.ship(value, name)) if callable(value) or isinstance(value, LossObjective) else value
            for name, value in arguments.items()
        }
        return Verb(self.name, path, shipped, returned)

    def function(self, function: Callable[..., Any], returned: Returned) -> Function:
        """Return the work that calls the caller's function."""
        return Function(self.name, self.executor.ship(function, getattr(function, "__name__", "fn")), returned)

    # ---- objects that stay on the ranks

    def new_key(self, kind: str) -> str:
        """Return a key for an object that stays on the ranks."""
        return f"{self.name}/{kind}/{next(self._numbers)}"

    def drop_with(self, owner: object, key: str) -> None:
        """Drop the objects of a key once ``owner`` is not used any more, with a later call."""
        weakref.finalize(owner, self._unused.append, key)

    def drop(self, key: str) -> None:
        """Drop an object on the ranks."""
        self.executor.start("drop", Drop((key,)), [None] * self.executor.size)

    def _drop_unused(self) -> None:
        with self._lock:
            keys, count = tuple(self._unused), len(self._unused)
            del self._unused[:count]
        if keys and self.seats is not None:
            self.executor.start("drop", Drop(keys), [None] * self.executor.size)

    # ---- what is returned

    def by_coordinate(self, values: Sequence[T]) -> list[T]:
        """Return the values of the ranks that have the outputs, by data-parallel coordinate."""
        mains = sorted((seat.dp_rank, rank) for rank, seat in enumerate(self.require_seats()) if seat.is_main)
        return [values[rank] for _, rank in mains]


def rank_0(values: Sequence[T]) -> T:
    """Return the value of rank 0."""
    return values[0]
