"""Evaluation of a policy on held-out rows: rewards of sampled answers, pass@k, and their uncertainty."""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import math
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any, TypeVar

from areal.inference.protocol import RolloutClient
from areal.inference.together import gather_or_cancel
from areal.trainer.rollout.call_pool import in_time
from areal.trainer.rollout.episodes import Episode
from areal.trainer.rollout.plan import Items
from areal.trainer.rollout.seeded import SeededClient
from areal.trainer.rollout.sequence import Sequence
from areal.utils.distributed import rank_in_world

_T = TypeVar("_T")

Z95 = 1.959963984540054
"""Quantile of the normal distribution that bounds a 95 % confidence interval."""


class PolicyEvaluation:
    """Plays episodes of held-out rows with the current weights of a rollout engine.

    The seed of an episode depends on the row and the number of the answer: two models with one seed differ in their weights only.

    Args:
        client: generates on this rank; ``None``, or a rollout that owns no servers: this rank plays no episode.
        episode: plays one row.
        rows: held-out rows.
        samples: episodes of each row.
        seed: seed of all episodes.
        episode_seconds: time limit of an episode; ``None`` for no limit.
        gather: returns the values of all ranks, such as :meth:`areal.utils.distributed.ControlPlane.gather`. Collective.
        max_concurrent: maximum number of concurrent episodes on this rank.
    """

    def __init__(
        self,
        client: RolloutClient | None,
        episode: Episode,
        rows: Items,
        *,
        samples: int,
        seed: int,
        gather: Callable[[Any], list[Any]],
        episode_seconds: float | None = None,
        max_concurrent: int = 256,
    ) -> None:
        self._client = client if getattr(client, "owns_servers", True) else None
        self._episode, self._rows = episode, rows
        self._samples, self._seed = samples, seed
        self._gather, self._max_concurrent = gather, max_concurrent
        self._episode_seconds = episode_seconds

    def rewards(self) -> list[list[float]]:
        """Return the reward of each episode, by row; equal on all ranks. Collective.

        Raises:
            RuntimeError: an episode failed, on any rank.
        """
        # 1. The ranks that play divide the rows.
        plays = self._gather(self._client is not None)
        size = sum(plays)
        mine: dict[int, list[float]] = {}
        error: BaseException | None = None
        if self._client is not None:
            first = sum(plays[: rank_in_world()])
            try:
                mine = _run(self._play(self._client, range(first, len(self._rows), size)))
            except (Exception, SystemExit) as raised:
                error = raised
        # 2. All ranks learn all rewards, or the first error.
        by_row: dict[int, list[float]] = {}
        fault = None if error is None else "".join(traceback.format_exception(error))
        for rewards, its_fault in self._gather((mine, fault)):
            if its_fault is not None:
                raise RuntimeError(f"an episode of the evaluation failed:\n{its_fault}") from error
            by_row |= rewards
        return [by_row[number] for number in range(len(self._rows))]

    async def _play(self, client: RolloutClient, numbers: range) -> dict[int, list[float]]:
        """Return the rewards of rows, by number."""
        free = asyncio.Semaphore(self._max_concurrent)

        async def play(number: int, sample: int) -> float:
            async with free:
                seeded = SeededClient(client, (self._seed, number, sample))
                return mean_reward(
                    await in_time(
                        self._episode.run(seeded, self._rows[number]),
                        self._episode_seconds,
                        "episode",
                        lambda: (
                            f"an episode of row {number} took longer than episode_seconds = {self._episode_seconds:g}"
                        ),
                    )
                )

        async with contextlib.AsyncExitStack() as stack:
            if isinstance(self._episode, contextlib.AbstractAsyncContextManager):
                await stack.enter_async_context(self._episode)
            rewards = await gather_or_cancel(play(n, k) for n in numbers for k in range(self._samples))
        return {number: rewards[i * self._samples : (i + 1) * self._samples] for i, number in enumerate(numbers)}


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, also where an event loop runs, such as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def reward_scalars(
    rewards: collections.abc.Sequence[collections.abc.Sequence[float]], pass_reward: float
) -> dict[str, float]:
    """Return the numbers of an evaluation, with names ``eval/...``.

    - ``reward``: mean over rows of the mean reward of a row's episodes.
    - ``reward_ci95``: half width of its 95 % confidence interval: 1.96 standard errors over rows, by the normal approximation.
    - ``pass@k`` for k = 1, 2, 4, ... up to the episodes of a row: :func:`pass_at_k` of episodes with at least ``pass_reward``, and
      ``pass@k_ci95`` likewise.

    Args:
        rewards: by row; each row has the same number of episodes.
        pass_reward: reward from which an episode passes.
    """
    samples = len(rewards[0])
    passed = [sum(reward >= pass_reward for reward in row) for row in rewards]
    columns = {"reward": [fmean(row) for row in rewards]}
    k = 1
    while k <= samples:
        columns[f"pass@{k}"] = [pass_at_k(samples, count, k) for count in passed]
        k *= 2
    scalars = {}
    for name, values in columns.items():
        scalars[f"eval/{name}"] = fmean(values)
        scalars[f"eval/{name}_ci95"] = Z95 * standard_error(values)
    return scalars


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of ``k`` answers passes (Chen et al. 2021, arXiv:2107.03374, equation 1).

    Args:
        samples: number of answers.
        passed: number of those that pass.
        k: at most ``samples``.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def standard_error(values: collections.abc.Sequence[float]) -> float:
    """Return the standard error of a mean of independent values; NaN for one value."""
    n = len(values)
    if n < 2:
        return math.nan
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def mean_reward(sequences: collections.abc.Sequence[Sequence]) -> float:
    """Return the reward of an episode: the mean over its sequences."""
    return fmean(sequence.reward for sequence in sequences)
