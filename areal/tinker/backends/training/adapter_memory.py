"""Adapters of models, and their memory on the ranks: how much one needs, and how much is available."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from areal.api import EngineMemory, TrainEngine
from areal.tinker.backends.prepared import AdapterSpec
from areal.utils.platform import free_memory


@dataclass
class Slot:
    """An adapter of the engine that belongs to a model.

    Attributes:
        name: name in the engine.
        adapter: description of the model's adapter.
        nbytes: bytes on each rank, with gradients and optimizer state.
        pending: gradients wait for a step.
    """

    name: str
    adapter: AdapterSpec
    nbytes: list[int] = field(default_factory=list)
    pending: bool = False


@dataclass(frozen=True)
class RankMemory:
    """Bytes of an engine on one rank, all adapters included.

    Attributes:
        allocated: bytes of existing tensors.
        missing: bytes of gradients and of optimizer state that do not exist yet.
        free: bytes that the process can still allocate.
    """

    allocated: int
    missing: int
    free: int

    @property
    def total(self) -> int:
        """Bytes of all tensors, once they exist."""
        return self.allocated + self.missing


def rank_memory(engine: TrainEngine, _: Any) -> RankMemory:
    """Return the memory of the rank that calls this."""
    report: EngineMemory = engine.memory()[0]
    kinds = [getattr(report, field.name) for field in fields(report)]
    return RankMemory(
        sum(kind.on_device for kind in kinds), sum(kind.missing for kind in kinds), free_memory(engine.device)
    )


@dataclass(frozen=True)
class Shortage:
    """The rank on which an adapter does not fit.

    Attributes:
        rank: rank.
        needed, available: bytes that the adapter needs there with its gradients and optimizer state, and bytes that others leave.
    """

    rank: int
    needed: int
    available: int

    def __str__(self) -> str:
        mib = (f"{nbytes / 2**20:.1f} MiB" for nbytes in (self.needed, max(0, self.available)))
        needed, available = mib
        return f"the adapter needs {needed} with its gradients and optimizer state, and {available} are available on rank {self.rank}"


def shortage(
    empty: Sequence[RankMemory],
    before: Sequence[RankMemory],
    after: Sequence[RankMemory],
    released: Sequence[int],
    budget: int | None,
) -> Shortage | None:
    """Return the first rank on which a new adapter does not fit, or ``None``.

    Args:
        empty: memory of each rank without models.
        before, after: memory of each rank before and after the adapter was added.
        released: bytes on each rank of an adapter that is removed afterwards.
        budget: bytes of all adapters of a rank; ``None`` for the free memory of its device.
    """
    for rank, (bare, old, new, gone) in enumerate(zip(empty, before, after, released, strict=True)):
        needed = new.total - old.total
        # Free memory is promised to gradients and states of other adapters, which may not exist yet.
        left = new.free + new.allocated - old.allocated - old.missing
        available = gone + (left if budget is None else budget - (old.total - bare.total))
        if needed > available:
            return Shortage(rank, needed, available)
    return None
