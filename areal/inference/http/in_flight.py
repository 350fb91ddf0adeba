"""Requests of one server that are not answered yet."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable
from typing import TypeVar

from areal.inference.http.concurrency_limit import ConcurrencyLimit

T = TypeVar("T")


class InFlight:
    """Requests of one server that are not answered yet. An update discards them without cancelling their answers.

    Args:
        limit: number of requests at once, which the caller respects; ``None`` for any number.

    Attributes:
        limit: as given.
        room: number of further requests; 0 while the server gets none.
        load: requests relative to the limit, and their number.
    """

    def __init__(self, limit: ConcurrencyLimit | None) -> None:
        self.limit = limit
        self._running: set[asyncio.Timeout] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._is_open = True
        self._measure()

    def open(self, is_open: bool) -> None:
        """Let the server get requests, or none."""
        self._is_open = is_open
        self._measure()

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, request: Awaitable[T]) -> T | None:
        """Return the result of a request, or ``None`` if it is discarded."""
        discarded = asyncio.timeout(None)
        try:
            async with discarded:
                return await self._count(discarded, request)
        except TimeoutError:
            if not discarded.expired():
                raise
            return None

    async def _count(self, discarded: asyncio.Timeout, request: Awaitable[T]) -> T:
        self._running.add(discarded)
        self._is_empty.clear()
        self._measure()
        try:
            return await request
        finally:
            self._running.discard(discarded)
            self._measure()
            if not self._running:
                self._is_empty.set()

    def _measure(self) -> None:
        # Attributes and no properties: all servers are looked at for each request.
        count, limit = len(self._running), math.inf if self.limit is None else self.limit.value
        self.room = max(0, limit - count) if self._is_open else 0
        self.load = (count / limit, count)

    async def end_within(self, seconds: float) -> bool:
        """Return whether there is no request left after some seconds at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), seconds)
        return not self._running

    async def discard(self) -> None:
        """Discard all requests."""
        for each in self._running:
            if not each.expired():
                each.reschedule(0.0)
        await self._is_empty.wait()
