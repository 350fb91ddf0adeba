"""Tokens that were computed: their number, and their rate."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0
"""Seconds over which a rate is the mean."""


class TokenRate:
    """Counts tokens. ``total`` is their number so far.

    Args:
        clock: seconds that only rise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._clock, self._begin = clock, clock()
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> None:
        """Count tokens whose computation has just ended."""
        self.total += tokens
        self._recent.append((self._clock(), tokens))
        self._forget()

    def per_second(self) -> float:
        """Return the tokens per second in the last :data:`WINDOW_S` seconds, or since the start if that is less."""
        self._forget()
        return sum(tokens for _, tokens in self._recent) / max(1.0, min(WINDOW_S, self._clock() - self._begin))

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < self._clock() - WINDOW_S:
            self._recent.popleft()
