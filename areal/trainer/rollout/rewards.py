"""Reward functions in a pool of threads or processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from areal.inference.protocol import Completion
from areal.trainer.rollout.call_pool import CallPool

Reward = Callable[[Any, Completion], float] | Callable[[Any, Completion], Awaitable[float]]
"""Returns the reward of an answer to an item. May be a coroutine function."""


class RewardPool(CallPool):
    """Pool of calls of a reward function: ``await pool(item, answer)``.

    Each rank that generates computes the rewards of its episodes. If one rank generates for all, it computes all rewards of the run:
    ``processes=True`` distributes them over the cores of its host.

    Args:
        reward: function from an item and an answer to a number.
        workers, seconds, processes: see :class:`~areal.trainer.rollout.call_pool.CallPool`.

    Raises:
        ValueError: a number is out of range, or ``reward`` cannot run in a process.
    """

    noun = "reward"

    def __init__(
        self, reward: Reward, *, workers: int = 16, seconds: float | None = None, processes: bool = False
    ) -> None:
        super().__init__(reward, workers=workers, seconds=seconds, processes=processes)
        self._reward = reward

    async def __call__(self, *args: Any) -> float:
        """Return the reward of an answer. Raises what :class:`~areal.trainer.rollout.call_pool.CallPool` raises."""
        return float(await super().__call__(*args))

    def close(self) -> None:
        """End the idle workers, and close the reward if it has a method ``close``. Both may be used again."""
        super().close()
        getattr(self._reward, "close", lambda: None)()

    def describe(self, argument: Any) -> str:
        return f"the reward of the item {argument}"
