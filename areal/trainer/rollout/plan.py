"""Plan of a rollout: the size of a batch, limits and seeds; and the groups that result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from areal.trainer.rollout.sequence import Sequence
from areal.utils.seeding import mixed

Keep = Callable[[list[Sequence]], bool]
"""Returns False for a group to replace with a group of the next item."""


class Items(Protocol):
    """Map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Group:
    """The sequences of one item.

    Attributes:
        index: number of the group in the run.
        sequences: sequences of all episodes that did not fail.
        failed: number of episodes that raised.
        error: kind and text of the first exception, or ``None``.
        traceback: traceback of the first exception, with the files and lines of the user's functions, or ``None``.
        rejected: mean reward of each group that ``keep`` rejected between the previous group and this one.
        cancelled: number of groups that were given up with this batch, because a later one may not have them. The first group of a batch on
            each rank counts them, and those of earlier batches to which its rank gave no group.
        position: position in the global batch, from 0. Set when the batch is complete.
    """

    index: int
    sequences: tuple[Sequence, ...]
    failed: int = 0
    error: str | None = None
    traceback: str | None = None
    rejected: tuple[float, ...] = ()
    cancelled: int = 0
    position: int = 0

    def state(self) -> dict[str, Any]:
        """Return the group as containers, numbers and tensors, for a checkpoint."""
        sequences = [sequence.state() for sequence in self.sequences]
        failures = {"failed": self.failed, "error": self.error, "traceback": self.traceback}
        return {"index": self.index, "sequences": sequences, **failures, "rejected": list(self.rejected)}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Group:
        """Restore a group from :meth:`state`."""
        # States of earlier releases have no episodes: there, every sequence was a member of its group.
        sequences = tuple(
            Sequence.of_state({"episode": number} | each) for number, each in enumerate(state["sequences"])
        )
        failures = (state["failed"], state["error"], state.get("traceback"))
        return cls(state["index"], sequences, *failures, tuple(state.get("rejected", ())))


@dataclass(frozen=True)
class Plan:
    """Size of a batch of rollouts, limits and seeds.

    Attributes:
        groups: items per batch, over all ranks.
        group_size: episodes per item.
        max_staleness: maximum number of versions between the weights with which a group begins and the weights that train on it.
        in_order: True: train on groups in the order in which they begin. False: on those that are complete, so that a long answer holds up no
            batch; short answers come first then.
        oversample: groups that run in addition to those that the batches within the bound need, over all ranks. Needs ``in_order=False``.
        partial_answers: True: a group that takes longer than the bound goes on, and is trained on without tokens that are older. False: it is
            cancelled. Needs ``in_order=False``.
        max_concurrent: maximum number of concurrent episodes on this rank.
        max_rejected: maximum number of groups that ``keep`` may reject for each group of a batch, counted on this rank over the batches that
            are being played; more are an error. ``None`` for no limit.
        max_failed_share: fraction of the episodes of a batch that may fail, over all ranks; more end the run: the others
            would be a biased batch. ``None`` for no limit.
        episode_seconds: time limit of an episode, after which it has failed; ``None`` for no limit.
        seed: seed of the order of items and of every episode.
        shuffle: draw a new order of the items in each epoch.

    Raises:
        ValueError: a number is out of range, or an option has no effect.
    """

    groups: int
    group_size: int = 1
    max_staleness: int = 0
    in_order: bool = True
    oversample: int = 0
    partial_answers: bool = False
    max_concurrent: int = 256
    max_rejected: int | None = 100
    max_failed_share: float | None = 0.1
    episode_seconds: float | None = None
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.episode_seconds is not None and not self.episode_seconds > 0:
            raise ValueError(f"Plan.episode_seconds = {self.episode_seconds}: it must be above 0, or None for no limit")
        if self.max_rejected is not None and self.max_rejected < 1:
            raise ValueError(f"Plan.max_rejected = {self.max_rejected}: it must be at least 1, or None for no limit")
        if self.max_failed_share is not None and not 0.0 <= self.max_failed_share <= 1.0:
            raise ValueError(
                f"Plan.max_failed_share = {self.max_failed_share}: it must be in [0, 1], or None for no limit"
            )
        # Every integer field with its smallest value.
        for name, least in (
            ("groups", 1),
            ("group_size", 1),
            ("max_staleness", 0),
            ("oversample", 0),
            ("max_concurrent", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"Plan.{name} = {getattr(self, name)}: it must be at least {least}")

        for name in ("oversample", "partial_answers"):
            if self.in_order and getattr(self, name):
                raise ValueError(
                    f"Plan.{name} = {getattr(self, name)} with in_order = True, where a batch waits for its groups: set in_order to False"
                )

    def item_of(self, index: int, n_items: int) -> int:
        """Return the index of a group's item: the data set is iterated epoch after epoch, each in another order.

        Args:
            index: number of the group in the run.
            n_items: number of items.
        """
        epoch, position = divmod(index, n_items)
        return _permutation(mixed(self.seed, epoch), n_items)[position] if self.shuffle else position

    def too_many_rejected(self, rejected: int, per_batch: int) -> RuntimeError | None:
        """Return an error if ``keep`` rejected more groups than is allowed for the batches that are being played.

        Args:
            rejected: number of rejected groups among those of these batches.
            per_batch: number of groups of a batch that this rank plays.
        """
        groups = per_batch * (self.max_staleness + 1)
        if self.max_rejected is None or rejected <= self.max_rejected * groups:
            return None
        return RuntimeError(
            f"keep= rejected {rejected} groups, more than Plan.max_rejected = {self.max_rejected} for each of the {groups} groups that this "
            "rank is to play now: change keep or the items, or raise max_rejected"
        )

    def order(self, n_items: int) -> dict[str, int]:
        """Return what the order of the groups of a run depends on, for its state.

        Args:
            n_items: number of items of the data set.
        """
        return {"items": n_items, "groups": self.groups, "seed": self.seed, "shuffle": int(self.shuffle)}

    def check_order(self, n_items: int, saved: Mapping[str, int]) -> None:
        """Check that a run continues with the order of groups of the saved one.

        Raises:
            ValueError: the numbers of items or of groups, the seed, or shuffling differ.
        """
        now = self.order(n_items)
        for name, value in saved.items():
            if now[name] != value:
                raise ValueError(
                    f"{'len(items)' if name == 'items' else f'Plan.{name}'} = {now[name]}, and the run was saved with {value}: groups would be "
                    f"repeated or left out; go on with {value}, or begin another run with the saved weights"
                )


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, length: int) -> list[int]:
    """Return a random order of ``length`` items. Two are cached: a batch may span two epochs."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
