"""How much is played, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from areal.trainer.rollout.protocol import Sequence

Keep = Callable[[list[Sequence]], bool]
"""Whether a group is to be learned from; one that is not gives its place to the next item."""


class Items(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Group:
    """The sequences of one item.

    Attributes:
        index: number of the group in the run.
        sequences: of all its episodes that did not fail.
        failed: episodes that raised. error: what the first of them raised.
    """

    index: int
    sequences: tuple[Sequence, ...]
    failed: int = 0
    error: str | None = None

    def state(self) -> dict[str, Any]:
        """As containers, numbers and tensors, which a checkpoint can hold."""
        sequences = [sequence.state() for sequence in self.sequences]
        return {"index": self.index, "sequences": sequences, "failed": self.failed, "error": self.error}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Group:
        """What :meth:`state` was taken of."""
        sequences = tuple(Sequence.of_state(each) for each in state["sequences"])
        return cls(state["index"], sequences, state["failed"], state["error"])


@dataclass(frozen=True)
class Plan:
    """How much is played, and by whom.

    Attributes:
        groups: items to a batch, of all ranks together.
        group_size: episodes to an item.
        max_staleness: versions by which the weights that began a group may be older than those that are trained on it.
        max_concurrent: most episodes of this rank at a time.
        episode_seconds: one that takes longer has failed.
        seed: of the order of items, and of every episode. shuffle: each epoch has an order of its own.

    Raises:
        ValueError: a number is out of its range.
    """

    groups: int
    group_size: int = 1
    max_staleness: int = 0
    max_concurrent: int = 256
    episode_seconds: float | None = None
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.episode_seconds is not None and not self.episode_seconds > 0:
            raise ValueError(f"Plan.episode_seconds = {self.episode_seconds}: it must be above 0, or None for no limit")
        for name, least in (("groups", 1), ("group_size", 1), ("max_staleness", 0), ("max_concurrent", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"Plan.{name} = {getattr(self, name)}: it must be at least {least}")
