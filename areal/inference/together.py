"""Requests that succeed or fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

R = TypeVar("R")


async def gather_or_cancel(work: Iterable[Awaitable[R]]) -> list[R]:
    """Await coroutines together. After an error or a cancellation, all are cancelled and awaited."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
