"""Limit of the requests that a server gets at once, found from its throughput."""

from __future__ import annotations

import math
import time

_FIRST_STEP, _SMALLEST_STEP = 2.0, 1.25
"""Factor between two limits that are compared, at first and after many comparisons."""
_GAIN = 0.1
"""Exponent of the least gain: with a limit of ``f`` times the other, the larger one must bring ``f ** 0.1`` times the throughput."""
_FEWEST_REPLIES = 16
"""Minimum number of replies of a measurement."""


class ConcurrencyLimit:
    """Number of requests that one server gets at once: the smallest one that hardly costs throughput.

    The limit begins at the maximum. The throughput at two neighbouring limits is compared again and again: the larger one is kept if it brings
    noticeably more tokens per second, and otherwise the smaller one. After a step that is kept, the next one goes in the same direction. After
    one that is not, the limit goes back, the factor becomes its root, and the next step goes in the other direction. So the limit follows a
    server that becomes slower or faster, as with longer prompts or after preemptions.

    By Little's law, the throughput is the limit times the tokens of all replies, divided by the seconds that their requests took. Only
    requests that began after the first reply since the last change of the limit count, because those that began together do not wait for each
    other yet, and only replies that come while the server has as many requests as it may: with less to do, the limit stays.

    Args:
        maximum: largest limit.

    Attributes:
        value: number of requests that the server may have now.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.value = maximum
        self._kept = self.value
        self._kept_throughput = 0.0
        self._step, self._goes_up = _FIRST_STEP, False
        self.restart()

    def restart(self) -> None:
        """Begin the measurement anew: what the requests under way take says nothing."""
        self._start: float | None = None
        self._replies = self._tokens = 0
        self._seconds = 0.0

    def note(self, began: float, tokens: int, in_flight: int) -> None:
        """Note a reply.

        Args:
            began: time on the monotonic clock at which its request began.
            tokens: number of its tokens.
            in_flight: number of requests that the server has, with this one.
        """
        now = time.monotonic()
        if in_flight < self.value:
            return
        if self._start is None:
            self._start = now
        if began < self._start:
            return
        self._replies += 1
        self._tokens += tokens
        self._seconds += now - began
        if self._replies >= max(self.value, _FEWEST_REPLIES):
            self._compare(self.value * self._tokens / self._seconds)
            self.restart()

    def _compare(self, throughput: float) -> None:
        """Choose the next limit, after a measurement at :attr:`value`."""
        if self.value == self._kept:
            self._kept_throughput = throughput
            self.value = self._neighbour()
        elif throughput > self._kept_throughput * (self.value / self._kept) ** _GAIN:
            self._kept, self._kept_throughput = self.value, throughput
            self.value = self._neighbour()
        else:
            self.value = self._kept
            self._step = max(_SMALLEST_STEP, math.sqrt(self._step))
            self._goes_up = not self._goes_up

    def _neighbour(self) -> int:
        """Return the limit to compare with the one that is kept."""
        larger = min(self._maximum, max(self._kept + 1, round(self._kept * self._step)))
        smaller = max(1, min(self._kept - 1, round(self._kept / self._step)))
        if larger == self._kept or smaller == self._kept:
            self._goes_up = larger > self._kept
        return larger if self._goes_up else smaller
