"""Answers of a server, and how far their log-probs are from those of the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from areal.inference.http import HTTPRollout
from areal.inference.http.servers.dialect import Dialect
from areal.inference.protocol import Completion, Sampling
from areal.tests.harness.limits import wait_until
from areal.tests.unit.inference.local.rollouts import plain_logprobs

TOLERANCE = 2e-5
"""Largest error of a log-prob, in nats."""


def prompt(number: int, length: int = 6) -> list[int]:
    """Return a prompt that no other number has."""
    return [(7 * i + 31 * number + number // 3) % 250 + 3 for i in range(length)]


def endless(*values: Any, **options: Any) -> Sampling:
    """Return sampling parameters without stop tokens: every answer has ``max_new_tokens``."""
    return Sampling(*values, **{"stop_token_ids": (), **options})


def run(*work: Coroutine[Any, Any, Completion], seconds: float = 240) -> list[Completion]:
    """Generate answers together."""

    async def together() -> list[Completion]:
        return await asyncio.wait_for(asyncio.gather(*work), seconds)

    return asyncio.run(together())


def error(
    models: Mapping[int, PreTrainedModel], prompts: Sequence[Sequence[int]], answers: Sequence[Completion]
) -> float:
    """Return the largest error of the answers' log-probs. Each token is judged by the weights of its version."""
    worst = 0.0
    for given, answer in zip(prompts, answers, strict=True):
        assert answer.sampling is not None
        versions = torch.tensor(answer.versions)
        for version in set(answer.versions):
            wanted = plain_logprobs(models[version], given, answer.tokens, answer.sampling)
            errors = (wanted - torch.tensor(answer.logprobs)).abs()[versions == version]
            worst = max(worst, float(errors.max()))
    return worst


class Clients:
    """Clients that ask for one answer after another, in a thread, until the block ends.

    Args:
        rollout: the rollout.
        count: number of clients.
        lengths: tokens of the answers of each client in turn. With different ones, answers do not end at the same time.

    Attributes:
        answered: prompts and answers, in the order of their end.
        faults: exceptions, each of which ends its client.
    """

    def __init__(self, rollout: HTTPRollout, count: int, lengths: Sequence[int]) -> None:
        self.rollout, self.count, self.lengths = rollout, count, lengths
        self.answered: list[tuple[list[int], Completion]] = []
        self.faults: list[Exception] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    @property
    def prompts(self) -> list[list[int]]:
        return [given for given, _ in self.answered]

    @property
    def answers(self) -> list[Completion]:
        return [answer for _, answer in self.answered]

    def wait_for(self, further: int, seconds: float = 120) -> None:
        """Wait for further answers."""
        number = len(self.answered)
        wait_until(lambda: len(self.answered) >= number + further or bool(self.faults), "further answers came", seconds)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)

    async def _all(self) -> None:
        await asyncio.gather(*(self._client(i) for i in range(self.count)))

    async def _client(self, number: int) -> None:
        asked = 0
        while not self._stop.is_set():
            given = prompt(number, 4 + asked % 5)
            sampling = endless(self.lengths[number % len(self.lengths)], seed=1000 * number + asked)
            try:
                self.answered.append((given, await self.rollout.generate(given, sampling)))
            except Exception as fault:
                self.faults.append(fault)
                return
            asked += 1


@contextmanager
def one_at_a_time(url: str, **defaults: Any) -> Iterator[Callable[..., HTTPRollout]]:
    """Yield a function of a dialect and options that makes a rollout on a server, and closes the one before."""
    made: list[HTTPRollout] = []

    def make(dialect: Dialect, **options: Any) -> HTTPRollout:
        for rollout in made:
            rollout.close()
        made.append(HTTPRollout(url, dialect, **{**defaults, **options}))
        return made[-1]

    yield make
    for rollout in made:
        rollout.close()
