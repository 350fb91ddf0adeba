"""The parts that are on the devices, and which of them leave for a request."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from areal.dispatch.shared_devices.uses import Kind, Part

LOOKAHEAD = 16
"""Announced uses that are simulated to choose what leaves."""

MOST_OVER_LRU = 1.5
"""Bytes moved are at most this multiple of those that the least-recently-used rule would have moved."""

_KINDS = list(Kind)


@dataclass(frozen=True)
class UsedParts:
    """Parts of one use.

    Attributes:
        needed: on the device during the use.
        created: allocated by the use if they do not exist.
        freed: freed by the end of the use.
    """

    needed: frozenset[Part]
    created: frozenset[Part] = frozenset()
    freed: frozenset[Part] = frozenset()


class Eviction:
    """Parts on the devices, next to those that the least-recently-used rule would keep there.

    That rule is simulated from the beginning, because it bounds the moves: a choice that looks ahead is made only if, at the end of what is
    announced, the bytes moved so far and those that still separate both sets of parts are at most :data:`MOST_OVER_LRU` times the bytes that
    the rule has moved. Otherwise parts leave that the rule does not keep either, which never makes this sum grow faster than the rule's bytes.

    Args:
        capacity: bytes of each device.

    Attributes:
        sizes: bytes of each part on each device.
        existing: parts that are allocated, on the device or in host memory.
        on_device: parts on the device.
        moved: bytes moved so far.
    """

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.capacity = dict(capacity)
        self.sizes: dict[Part, dict[str, int]] = {}
        self.existing: set[Part] = set()
        self.on_device: set[Part] = set()
        self.moved = 0
        # By the least-recently-used rule.
        self._lru: set[Part] = set()
        self._lru_moved = 0
        self._last: dict[Part, int] = {}
        self._clock = 0

    # ---- sizes

    def nbytes(self, parts: Iterable[Part]) -> int:
        """Return the bytes of parts on all devices."""
        return sum(sum(self.sizes[part].values()) for part in parts)

    def bytes_on(self, device: str, parts: Iterable[Part]) -> int:
        """Return the bytes of parts on one device."""
        return sum(self.sizes[part].get(device, 0) for part in parts)

    def set_part(self, part: Part, sizes: Mapping[str, int], *, existing: bool, on_device: bool) -> None:
        """Add a part, or correct its bytes and its place, for the least-recently-used rule too."""
        known = (part in self.existing, part in self.on_device) if part in self.sizes else None
        self.sizes[part] = dict(sizes)
        if known == (existing, on_device):
            return
        self._last.setdefault(part, 0)
        for parts, member in ((self.existing, existing), (self.on_device, on_device), (self._lru, on_device)):
            (parts.add if member else parts.discard)(part)

    def remove(self, part: Part) -> None:
        """Remove a part that is gone."""
        for parts in (self.existing, self.on_device, self._lru):
            parts.discard(part)
        del self.sizes[part], self._last[part]

    # ---- a request

    def plan(
        self, request: UsedParts, upcoming: Sequence[UsedParts] = (), pinned: frozenset[Part] = frozenset()
    ) -> tuple[list[Part], list[Part]]:
        """Make room for a request. Returns the parts that leave, and those that come after.

        Args:
            request: must fit together with ``pinned``.
            upcoming: requests that follow, as far as they are known.
            pinned: parts that other uses need at the same time.
        """
        window = [request, *(each for each in upcoming if self.fits(each.needed))][: LOOKAHEAD + 1]
        # Look ahead for so many requests, then follow the rule. Without an announcement, follow it from the start.
        best, lowest = 0, math.inf
        for steps in range(len(window) + 1 if len(window) > 1 else 1):
            trial = self._trial(window, steps, pinned)
            cost = trial.moved + trial.nbytes(trial.on_device ^ trial._lru)
            if steps == 0 or (cost < lowest and cost <= MOST_OVER_LRU * trial._lru_moved):
                best, lowest = steps, cost
        return self._serve(request, window[1:], best > 0, pinned)

    def finish(self, request: UsedParts) -> None:
        """End a request: free what its use frees."""
        for parts in (self.existing, self.on_device, self._lru):
            parts -= request.freed

    def fits(self, parts: Collection[Part]) -> bool:
        """Return whether the parts fit on their devices together."""
        return all(self.bytes_on(device, parts) <= capacity for device, capacity in self.capacity.items())

    def _trial(self, window: Sequence[UsedParts], steps: int, pinned: frozenset[Part]) -> Eviction:
        """Return the state after some requests, of which ``steps`` look ahead."""
        trial = copy.copy(self)
        for name in ("existing", "on_device", "_lru", "_last"):
            setattr(trial, name, copy.copy(getattr(self, name)))
        for number, request in enumerate(window):
            trial._serve(request, window[number + 1 :], number < steps, pinned if number == 0 else frozenset())
            trial.finish(request)
        return trial

    def _serve(
        self, request: UsedParts, upcoming: Sequence[UsedParts], ahead: bool, pinned: frozenset[Part]
    ) -> tuple[list[Part], list[Part]]:
        kept = request.needed | pinned
        # 1. The moves of the rule.
        gone = self._victims(self._lru, kept, sorted(self._lru - kept, key=self._recency))
        come = (request.needed & self.existing) - self._lru
        self._lru = (self._lru - set(gone)) | come
        self._lru_moved += self.nbytes(gone) + self.nbytes(come)
        # 2. Our own moves: parts leave that are needed last, or that the rule does not keep; and of these none in vain.
        candidates = sorted(self.on_device - kept, key=self._recency)
        if ahead:
            candidates.sort(key=lambda part: (-_next_use(part, upcoming), self.nbytes([part])))
        else:
            candidates.sort(key=lambda part: part in self._lru)
        leaving = self._without_surplus(kept, self._victims(self.on_device, kept, candidates))
        coming = sorted((request.needed & self.existing) - self.on_device, key=self._recency)
        self.on_device = (self.on_device - set(leaving)) | set(coming)
        self.moved += self.nbytes(leaving) + self.nbytes(coming)
        # 3. The use itself.
        self._clock += 1
        self._last |= dict.fromkeys(request.needed, self._clock)
        for parts in (self.existing, self.on_device, self._lru):
            parts |= request.created
        return leaving, coming

    def _victims(self, on_device: set[Part], kept: frozenset[Part], order: Sequence[Part]) -> list[Part]:
        """Return parts to remove, in this order, until ``kept`` fits on every device."""
        present = on_device | kept
        lacking = {device: self.bytes_on(device, present) - capacity for device, capacity in self.capacity.items()}
        victims = []
        for part in order:
            if any(lacking[device] > 0 and nbytes > 0 for device, nbytes in self.sizes[part].items()):
                victims.append(part)
                for device, nbytes in self.sizes[part].items():
                    lacking[device] -= nbytes
        return victims

    def _without_surplus(self, kept: frozenset[Part], victims: Sequence[Part]) -> list[Part]:
        """Return the victims without those that later ones made unnecessary, the largest first."""
        leaving = list(victims)
        for part in sorted(victims, key=lambda part: -self.nbytes([part])):
            others = [other for other in leaving if other != part]
            if self.fits((self.on_device - set(others)) | kept):
                leaving = others
        return leaving

    def _recency(self, part: Part) -> tuple[int, int, str]:
        """Return the key that sorts by last use, then by kind, then by name."""
        return self._last[part], _KINDS.index(part.kind), part.owner


def _next_use(part: Part, upcoming: Sequence[UsedParts]) -> float:
    return next((number for number, request in enumerate(upcoming) if part in request.needed), math.inf)
