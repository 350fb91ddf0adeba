"""Per-episode seeds, so that the tokens of an episode do not depend on concurrent episodes."""

from __future__ import annotations

from dataclasses import replace

from areal.inference.protocol import Completion, RolloutClient, Sampling
from areal.utils.data.image_prompt import Prompt
from areal.utils.seeding import mixed


class SeededClient:
    """Client of one episode that adds a seed to each request without one, derived from the episode and the number of the request.

    Args:
        client: client that generates.
        episode_key: numbers that identify the episode.
    """

    def __init__(self, client: RolloutClient, episode_key: tuple[int, ...]) -> None:
        self._client = client
        self._episode_key = episode_key
        self._requests = 0

    @property
    def version(self) -> int:
        """Version of the weights that generate now."""
        return self._client.version

    async def generate(self, prompt_ids: Prompt, sampling: Sampling) -> Completion:
        """Generate an answer; see :meth:`RolloutClient.generate`."""
        # Requests with a seed are left as they are, and do not shift the seeds of others.
        if sampling.seed is None:
            sampling = replace(sampling, seed=mixed(*self._episode_key, self._requests))
            self._requests += 1
        completion = await self._client.generate(prompt_ids, sampling)
        # The trainer needs the parameters, and a client of another package may not record them.
        return completion if completion.sampling is not None else replace(completion, sampling=sampling)
