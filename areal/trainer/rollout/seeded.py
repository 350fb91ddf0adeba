"""Random numbers that belong to an episode, and to nothing that runs beside it."""

from __future__ import annotations

import collections.abc
from dataclasses import replace

from areal.trainer.rollout.protocol import Completion, RolloutClient, Sampling
from areal.utils.seeding import mixed


class SeededClient:
    """Gives every request of one episode that has no seed one of its own, from what the episode is and how many it has made.

    Args:
        of: numbers that no other episode has.
    """

    def __init__(self, client: RolloutClient, of: tuple[int, ...]) -> None:
        self._client = client
        self._of = of
        self._made = 0

    @property
    def version(self) -> int:
        """Of the weights that are serving now."""
        return self._client.version

    async def generate(self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling) -> Completion:
        """As the client."""
        if sampling.seed is None:
            sampling = replace(sampling, seed=mixed(*self._of, self._made))
            self._made += 1
        return await self._client.generate(prompt_ids, sampling)
