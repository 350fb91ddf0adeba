"""Episodes that most runs need."""

from __future__ import annotations

import collections.abc
from collections.abc import Awaitable, Callable
from typing import Any

from areal.trainer.rollout.protocol import Completion, RolloutClient, Sampling, Sequence

Prompt = Callable[[Any], collections.abc.Sequence[int]]
"""The tokens that an item begins with."""

Reward = Callable[[Any, Completion], float] | Callable[[Any, Completion], Awaitable[float]]
"""What an answer to an item is worth; may be a coroutine function."""


class SingleTurn:
    """A prompt, one answer, a reward.

    Args:
        prompt: the tokens of an item.
        reward: of an item and the answer to it.
        sampling: how answers are drawn.
    """

    def __init__(self, prompt: Prompt, reward: Reward, sampling: Sampling) -> None:
        self._prompt = prompt
        self._reward = reward
        self._sampling = sampling

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        prompt_ids = self._prompt(item)
        completion = await client.generate(prompt_ids, self._sampling)
        worth = self._reward(item, completion)
        return [Sequence.single(prompt_ids, completion, await worth if isinstance(worth, Awaitable) else worth)]
