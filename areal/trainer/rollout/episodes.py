"""Ready-made episodes."""

from __future__ import annotations

import collections.abc
from collections.abc import Awaitable, Callable
from typing import Any

from areal.trainer.rollout.protocol import Completion, RolloutClient, Sampling, Sequence

Prompt = Callable[[Any], collections.abc.Sequence[int]]
"""Returns the prompt's token ids of an item."""

Reward = Callable[[Any, Completion], float] | Callable[[Any, Completion], Awaitable[float]]
"""Returns the reward of an answer to an item. May be a coroutine function."""


class SingleTurn:
    """Episode of one prompt, one answer and its reward.

    Args:
        prompt: function from an item to the prompt's token ids.
        reward: function from an item and an answer to a number.
        sampling: sampling parameters of the answers.
    """

    def __init__(self, prompt: Prompt, reward: Reward, sampling: Sampling) -> None:
        self._prompt = prompt
        self._reward = reward
        self._sampling = sampling

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Generate one answer and compute its reward."""
        prompt_ids = self._prompt(item)
        completion = await client.generate(prompt_ids, self._sampling)
        # A reward may need I/O, such as a judge model or a sandbox.
        reward = self._reward(item, completion)
        return [Sequence.single(prompt_ids, completion, await reward if isinstance(reward, Awaitable) else reward)]
