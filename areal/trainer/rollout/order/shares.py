"""Groups of a run that one rank plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Share:
    """Every ``size``-th group of each batch, from position ``rank``. Numbers count the groups of this rank, indices those of the run.

    Attributes:
        rank: index among the ranks that run episodes.
        size: number of these ranks.
        groups: groups of a batch, over all ranks.
    """

    rank: int
    size: int
    groups: int

    @property
    def per_batch(self) -> int:
        """Number of groups of a batch that the rank plays. 0 if there are more ranks than groups."""
        return self.of(self.groups)

    def of(self, count: int) -> int:
        """Return how many of ``count`` consecutive positions are those of the rank."""
        return len(range(self.rank, count, self.size))

    def index(self, number: int) -> int:
        """Return the index in the run of the rank's group ``number``."""
        batch, place = divmod(number, self.per_batch)
        return batch * self.groups + place * self.size + self.rank


def equal_counts(size: int, groups: int) -> list[int]:
    """Return how many groups of a batch each of ``size`` ranks gives, if all give those that they play for it."""
    return [Share(rank, size, groups).per_batch for rank in range(size)]


def counts_of_complete(complete: Sequence[Sequence[tuple[int, int]]], groups: int) -> list[int] | None:
    """Return how many groups each rank gives to a batch, such that those that began first precede, or ``None`` if there are too few.

    Args:
        complete: of each rank, the groups that it can give, in the order in which it would: number of batches trained on when each began, and
            its index in the run.
        groups: groups of a batch, over all ranks.
    """
    # A group comes after all those that its rank gives before it, also if they began later: they were played again.
    order = sorted((key, rank) for rank, its in enumerate(complete) for key in accumulate(its, max))
    ranks = [rank for _, rank in order[:groups]]
    return [ranks.count(rank) for rank in range(len(complete))] if len(ranks) == groups else None


def position_of(place: int, rank: int, counts: Sequence[int]) -> int:
    """Return the position in a batch of a rank's group number ``place``: the first group of every rank, then the second, and so on.

    Args:
        place: from 0.
        rank: index among the ranks that run episodes.
        counts: how many groups each of these gives to the batch.
    """
    return sum(min(count, place + (other < rank)) for other, count in enumerate(counts))
