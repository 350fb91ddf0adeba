"""Runs of a runner on a client that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from areal.inference.protocol import Completion, Sampling
from areal.trainer.rollout.episodes import SingleTurn
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner

ITEMS = list(range(10))


class Client:
    """Answers with the prompt's token and the seed, after a moment."""

    version = 0

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.delay = delay
        self.asked: list[tuple[int, int]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        assert sampling.seed is not None
        self.asked.append((prompt_ids[0], sampling.seed))
        await asyncio.sleep(self.delay())
        return Completion((prompt_ids[0], sampling.seed), (-1.0, -2.0), (0, 0), "stop")


def episode(reward: Callable[[Any, Completion], Any] = lambda item, answer: 1.0) -> SingleTurn:
    return SingleTurn(lambda item: [item], reward, Sampling())


@contextmanager
def running(client: Any, played: Any, plan: Plan, **options: Any) -> Iterator[Runner]:
    runner = Runner(client, played, ITEMS, plan, **options)
    try:
        yield runner
    finally:
        runner.close()


def tokens(groups: list[Any]) -> list[tuple[int, list[tuple[int, ...]]]]:
    return [(group.index, [tuple(seq.segments[1].tokens) for seq in group.sequences]) for group in groups]


def batches(n: int, plan: Plan, client: Any = None, **options: Any) -> list[Any]:
    with running(client or Client(), episode(), plan, **options) as runner:
        actual = []
        for trained in range(n):
            runner.advance(trained)
            actual.append(tokens(runner.next_batch(timeout=20)))
        return actual
