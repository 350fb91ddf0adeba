"""Groups of a run that one rank plays."""

from __future__ import annotations

from dataclasses import dataclass


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
