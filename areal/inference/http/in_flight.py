"""Requests of one server that are not answered yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class InFlight:
    """Requests of one server that are not answered yet. An update discards them without cancelling their answers."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._limits)

    async def run(self, request: Awaitable[T]) -> T | None:
        """Return the result of a request, or ``None`` if it is discarded."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                return await self._count(limit, request)
        except TimeoutError:
            if not limit.expired():
                raise
            return None

    async def _count(self, limit: asyncio.Timeout, request: Awaitable[T]) -> T:
        self._limits.add(limit)
        self._is_empty.clear()
        try:
            return await request
        finally:
            self._limits.discard(limit)
            if not self._limits:
                self._is_empty.set()

    async def end_within(self, seconds: float) -> bool:
        """Return whether there is no request left after some seconds at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), seconds)
        return not self._limits

    async def discard(self) -> None:
        """Discard all requests."""
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)
        await self._is_empty.wait()
