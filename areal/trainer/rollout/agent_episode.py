"""Episodes of agent programs that know an endpoint only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal.inference.gateway import Gateway
from areal.inference.protocol import RolloutClient
from areal.trainer.rollout.call_pool import CallPool
from areal.trainer.rollout.rewards import RewardPool
from areal.trainer.rollout.sequence import Sequence


class AgentEpisode:
    """Episode of an agent program, which asks a :class:`~areal.inference.gateway.Gateway` in place of a provider.

    Each run has a session of its own. All that is sampled in it becomes sequences with one reward. Means are logged: ``requests`` and
    ``refused`` requests of an episode, and its ``sequences``.

    Args:
        gateway: serves while a runner has the episode.
        agent: function from ``base_url`` and an item to a result. A coroutine function runs on the event loop, another function in threads. A
            :class:`~areal.trainer.rollout.call_pool.CallPool` sets their number or a time limit.
        reward: function from an item and the result to a number, or a :class:`~areal.trainer.rollout.rewards.RewardPool`.
        max_requests: maximum number of requests of an episode that are answered or under way; ``None`` for no limit.
    """

    def __init__(
        self,
        gateway: Gateway,
        agent: Callable[[str, Any], Any] | CallPool,
        reward: Callable[..., Any] | RewardPool,
        *,
        max_requests: int | None = None,
    ) -> None:
        self._gateway, self._max_requests = gateway, max_requests
        self._agent = agent if isinstance(agent, CallPool) else CallPool(agent, workers=256)
        self._rewards = reward if isinstance(reward, RewardPool) else RewardPool(reward)

    async def __aenter__(self) -> AgentEpisode:
        await self._gateway.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._gateway.__aexit__(*error)

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Run the agent once. What it does after its session is refused.

        Raises:
            ValueError: no request of the agent was answered.
        """
        with self._gateway.session(client, max_requests=self._max_requests) as session:
            result = await self._agent(session.base_url, item)
        sampled = session.sequences()
        if not sampled:
            raise ValueError(f"the agent had no answer from its base_url; requests: {dict(session.counts) or 'none'}")
        reward = await self._rewards(item, result)
        stats = session.stats(sampled)
        return [Sequence(each.segments, reward, truncated=each.truncated, stats=dict(stats)) for each in sampled]

    def close(self) -> None:
        """Release the threads of agent and reward. Called when a runner closes."""
        self._agent.close()
        self._rewards.close()
