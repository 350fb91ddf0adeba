"""Bytes that a rank moves between a device and host memory, which the next step reports."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class MovedBytes:
    """Bytes since the last step, by name of the metric.

    Attributes:
        totals: bytes that were moved. They are summed over ranks.
        peaks: most bytes that were in one place at a time. Of the ranks, the largest counts.
    """

    totals: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)

    def reach(self, name: str, nbytes: int) -> None:
        """Raise a peak to ``nbytes``, if it is lower."""
        self.peaks[name] = max(self.peaks[name], nbytes)

    @classmethod
    def of_ranks(cls, each: Iterable[MovedBytes]) -> MovedBytes:
        """Combine the bytes of several ranks."""
        ranks = list(each)
        totals = functools.reduce(operator.add, (rank.totals for rank in ranks), Counter[str]())
        return cls(totals, functools.reduce(operator.or_, (rank.peaks for rank in ranks), Counter[str]()))

    def copy(self) -> MovedBytes:
        """Return a copy, which later steps do not change."""
        return MovedBytes(Counter(self.totals), Counter(self.peaks))

    def clear(self) -> None:
        """Begin anew, after a step has reported the bytes."""
        self.totals.clear()
        self.peaks.clear()
