"""Episodes: how an item of the data set becomes sequences to train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from areal.inference.protocol import RolloutClient, Sampling
from areal.trainer.rollout.rewards import Reward, RewardPool
from areal.trainer.rollout.sequence import Sequence
from areal.utils.data.image_prompt import Prompt


class Episode(Protocol):
    """Turns an item of the data set into sequences to train on, with any number of turns, tools and branches.

    The sequences of one run are one member of their group: its reward in the baseline is the mean of their rewards.
    If it has a method ``close``, a runner calls it at its end. If it is an asynchronous context manager, the runner enters it on its event loop
    before the first run, and leaves it after the last: there it can start what all runs share, such as a server. ``run`` must not block the
    event loop, on which all episodes run: slow synchronous work belongs in a :class:`~areal.trainer.rollout.rewards.RewardPool` or in
    ``asyncio.to_thread``.
    """

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Run the episode once. An exception counts as a failed episode, and the run continues."""


class SingleTurn:
    """Episode of one prompt, one answer and its reward.

    Args:
        prompt: function from an item to the prompt: its token ids, or with images an :class:`~areal.utils.data.image_prompt.ImagePrompt`.
        reward: function from an item and an answer to a number. A coroutine function runs on the event loop, another function in threads.
            Pass a :class:`~areal.trainer.rollout.rewards.RewardPool` to set a time limit or the number of threads, or to use processes.
        sampling: sampling parameters of the answers.
    """

    def __init__(self, prompt: Callable[[Any], Prompt], reward: Reward, sampling: Sampling) -> None:
        self._prompt = prompt
        self._rewards = reward if isinstance(reward, RewardPool) else RewardPool(reward)
        self._sampling = sampling

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Generate one answer and compute its reward."""
        prompt = self._prompt(item)
        completion = await client.generate(prompt, self._sampling)
        return [Sequence.single(prompt, completion, await self._rewards(item, completion))]

    def close(self) -> None:
        """Release the threads or processes of the reward. Called when a runner closes; others may still use the episode."""
        self._rewards.close()
