"""Prediction of uses: a trainer repeats them step after step."""

from __future__ import annotations

from collections import deque

from areal.dispatch.shared_devices.eviction import LOOKAHEAD
from areal.dispatch.shared_devices.uses import Need, Use

LENGTH = 256
"""Number of uses that are remembered."""


class History:
    """The latest uses, without repetitions of one use and without those that need no state."""

    def __init__(self) -> None:
        self._needs: deque[Need] = deque(maxlen=LENGTH)

    def add(self, need: Need) -> None:
        """Add a use."""
        if need.use is not Use.CHANGE and (not self._needs or self._needs[-1] != need):
            self._needs.append(need)

    def forget(self, owner: str) -> None:
        """Remove the uses of a model or a rollout."""
        self._needs = deque((need for need in self._needs if need.owner != owner), maxlen=LENGTH)

    def following(self, need: Need) -> list[Need]:
        """Predict the uses after ``need``, which is about to begin: those that followed it after the same uses before.

        Returns:
            At most :data:`LOOKAHEAD` uses; none for a use that is new.
        """
        needs = [*self._needs] if self._needs and self._needs[-1] == need else [*self._needs, need]
        last = len(needs) - 1
        # The position whose uses before it agree with the latest ones for longest, and the latest of these.
        agreeing = [(_agreeing(needs, i, last), i) for i in range(last) if needs[i] == need]
        if not agreeing:
            return []
        start = max(agreeing)[1]
        # The uses since then repeat.
        period = last - start
        return [needs[start + 1 + k % period] for k in range(LOOKAHEAD)]


def _agreeing(needs: list[Need], i: int, j: int) -> int:
    """Return the number of equal uses before two positions, at most :data:`LOOKAHEAD`."""
    n = 0
    while n < min(i, LOOKAHEAD) and needs[i - n - 1] == needs[j - n - 1]:
        n += 1
    return n
