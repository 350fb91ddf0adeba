"""Answers that wait until a server can take their next request, in the order in which they came."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math


class WaitingLine:
    """Answers that wait until a server can take their next request, in the order in which they came.

    Attributes:
        waiting: the answers: their places, a number that breaks ties, and the future that lets them go on.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._chosen = 0  # answers that were chosen and have not gone on yet

    def ticket(self) -> int:
        """Return the place of an answer that comes now."""
        return next(self._numbers)

    async def wait(self, ticket: int, seconds: float | None) -> None:
        """Wait until :meth:`wake` chooses this answer.

        Args:
            ticket: its place. It keeps it when it waits again.
            seconds: time limit; ``None`` for none.

        Raises:
            TimeoutError: the time has passed.
        """
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, (ticket, next(self._numbers), woken))
        try:
            async with asyncio.timeout(seconds):
                await woken
        except (asyncio.CancelledError, TimeoutError):
            # An answer that was chosen and cancelled at once leaves its turn to the next one.
            if not woken.cancelled():
                self._choose(1)
            raise
        finally:
            if not woken.cancelled():
                self._chosen -= 1

    def wake(self, count: float = math.inf) -> None:
        """Let the first answers go on.

        Args:
            count: number of requests that servers can take, also for those that were chosen and have not gone on yet.
        """
        self._choose(count - self._chosen)

    def _choose(self, count: float) -> None:
        while self.waiting and count > 0:
            woken = heapq.heappop(self.waiting)[2]
            if not woken.done():
                woken.set_result(None)
                self._chosen += 1
                count -= 1
