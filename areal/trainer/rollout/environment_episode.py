"""Episodes of several turns in an environment, such as a game."""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from areal.chat import Chat, Conversation, ParsedAnswer
from areal.chat.answer import Message
from areal.inference.protocol import RolloutClient, Sampling
from areal.trainer.rollout.call_pool import CallPool
from areal.trainer.rollout.sequence import Sequence
from areal.trainer.rollout.turn_limits import TurnLimits

_CLOSE_SECONDS = 2.0
"""Seconds that an episode that failed or was cancelled waits for a thread to close its environment, which a thread does later otherwise."""


@dataclass(frozen=True)
class Step:
    """What an environment returns for an answer.

    Attributes:
        messages: messages that the model reads before its next answer; at least one, unless ``done``.
        reward: added to the reward of the episode.
        done: the episode is over.
    """

    messages: collections.abc.Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """Environment of one episode. Its methods are called one after the other, each in any thread, or are coroutines.

    If it has a method ``close``, that is called at the end of the episode, also if the episode fails or is cancelled.
    """

    def reset(self, item: Any) -> list[Message] | Awaitable[list[Message]]:
        """Begin an episode with an item of the data set, and return the first messages."""

    def step(self, answer: ParsedAnswer) -> Step | Awaitable[Step]:
        """Take an answer of the model. The last one may be incomplete (``answer.complete``)."""


class EnvironmentPool(CallPool):
    """Pool of calls of environments: ``await pool(name, function, *args)``."""

    noun = "environment"

    def __init__(self, *, workers: int, seconds: float | None) -> None:
        super().__init__(_call, workers=workers, seconds=seconds)

    def describe(self, argument: Any) -> str:
        return f"the call of {argument} of an environment"


class EnvironmentEpisode:
    """Episode in which an environment takes each answer, until it is done or a limit is reached.

    The reward of the episode is the sum of the rewards of its steps. A method that raises or takes too long fails the episode. Means are
    logged: ``turns`` of an episode, and ``done``, the fraction of episodes that the environment has ended.

    Args:
        chat: template of the model.
        make: returns a new environment, such as its class.
        sampling: sampling parameters of each turn. Its stop tokens are those of the chat; it has no ``stop`` strings.
        max_turns: maximum number of answers.
        max_tokens: maximum number of sampled tokens of an episode; ``None`` for no limit.
        seconds: time limit of a call of the environment. ``make`` is part of the first.
        workers: maximum number of calls at once, in threads. Coroutines run on the event loop.
        rewrites: for a template that changes earlier turns: see :class:`~areal.chat.Conversation`.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        chat: Chat,
        make: Callable[[], Environment],
        sampling: Sampling,
        *,
        max_turns: int = 8,
        max_tokens: int | None = None,
        seconds: float = 60.0,
        workers: int = 16,
        rewrites: Literal["error", "keep"] = "error",
    ) -> None:
        self._chat, self._make, self._rewrites = chat, make, rewrites
        self._limits = TurnLimits(chat, sampling, max_turns, max_tokens)
        self._pool = EnvironmentPool(workers=workers, seconds=seconds)

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Run one episode in a new environment.

        Raises:
            ValueError: a step is no :class:`Step`, or has no messages before the end.
            TimeoutError: a call of the environment took too long.
        """
        made = _Made(self._make)
        try:
            sequence = await self._play(client, made, item)
            await self._pool("close", made.close)
        except (Exception, asyncio.CancelledError):
            # The first error is the one to report.
            with contextlib.suppress(Exception):
                await self._pool.call_in_any_case(_CLOSE_SECONDS, "close", made.close)
            raise
        return [sequence]

    def close(self) -> None:
        """Release the threads. Called when a runner closes; others may still use the episode."""
        self._pool.close()

    async def _play(self, client: RolloutClient, made: _Made, item: Any) -> Sequence:
        """Take turns until the environment is done or a limit is reached."""
        talk = self._chat.start(await self._pool("reset", made.reset, item), self._rewrites)
        reward = 0.0
        while True:
            answer = await self._limits.answer(client, talk)
            step = await self._pool("step", made.step, answer)
            if not isinstance(step, Step):
                raise ValueError(f"step returned {step!r:.200}: it must return a Step")
            reward += step.reward
            if step.done or self._limits.reached(talk):
                return _sequence(talk, reward, step)
            if not step.messages:
                raise ValueError("step returned no messages and done = False: the model has nothing to answer")
            talk.add(*step.messages)


class _Made:
    """An environment once it is made: calls do not overlap, not even with one that took too long and still runs in its thread."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Any = None
        self._lock = threading.Lock()
        self._closed = False

    def reset(self, item: Any) -> Any:
        with self._lock:
            if self._closed:
                raise RuntimeError("the episode has ended")
            self._environment = self._make()
            return self._environment.reset(item)

    def step(self, answer: ParsedAnswer) -> Any:
        with self._lock:
            return self._environment.step(answer)

    def close(self) -> Any:
        # Also while an earlier close hangs, which has the lock.
        if self._closed:
            return None
        with self._lock:
            self._closed = True
            return getattr(self._environment, "close", lambda: None)()


def _call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _sequence(talk: Conversation, reward: float, last: Step) -> Sequence:
    stats = {"turns": float(len(talk.answers)), "done": float(last.done)}
    return Sequence(talk.segments, reward, truncated=not talk.answers[-1].complete, stats=stats, images=talk.images)
