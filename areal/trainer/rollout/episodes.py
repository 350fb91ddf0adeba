"""Ready-made episodes."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from typing import Any

from areal.trainer.rollout.protocol import RolloutClient, Sampling, Sequence
from areal.trainer.rollout.rewards import Reward, RewardPool

Prompt = Callable[[Any], collections.abc.Sequence[int]]
"""Returns the prompt's token ids of an item."""


class SingleTurn:
    """Episode of one prompt, one answer and its reward.

    Args:
        prompt: function from an item to the prompt's token ids.
        reward: function from an item and an answer to a number. A coroutine function runs on the event loop, another function in threads.
            Pass a :class:`~areal.trainer.rollout.rewards.RewardPool` to set a time limit or the number of threads, or to use processes.
        sampling: sampling parameters of the answers.
    """

    def __init__(self, prompt: Prompt, reward: Reward, sampling: Sampling) -> None:
        self._prompt = prompt
        self._rewards = reward if isinstance(reward, RewardPool) else RewardPool(reward)
        self._sampling = sampling

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Generate one answer and compute its reward."""
        prompt_ids = self._prompt(item)
        completion = await client.generate(prompt_ids, self._sampling)
        return [Sequence.single(prompt_ids, completion, await self._rewards(item, completion))]

    def close(self) -> None:
        """Release the threads or processes of the reward. Called when a runner closes; others may still use the episode."""
        self._rewards.close()
