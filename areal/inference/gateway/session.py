"""One program's requests, and what was sampled for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from areal.chat import Chat, Conversation, ParsedAnswer
from areal.chat.answer import Message
from areal.inference.gateway.history import MessageHistory
from areal.inference.gateway.recording import Recording, SampledSequence
from areal.inference.gateway.request_error import RequestError
from areal.inference.protocol import Completion, RolloutClient, Sampling
from areal.inference.together import gather_or_cancel

R = TypeVar("R")


class Session:
    """Requests of one program: made by :meth:`Gateway.session`.

    Attributes:
        id: unguessable name, which is part of ``base_url``, and also an API key.
        base_url: URL to give to the program.
        counts: ``requests`` that were answered, and those that were not, by the code of their error.
    """

    def __init__(
        self, id: str, base_url: str, client: RolloutClient, history: MessageHistory, max_requests: int | None
    ) -> None:
        self.id, self.base_url = id, base_url
        self.counts: Counter[str] = Counter()
        self._client, self._history, self._max_requests = client, history, max_requests
        self._recording = Recording()
        self._running: set[asyncio.Task[Any]] = set()
        self._ended: str | None = None

    def sequences(self) -> list[SampledSequence]:
        """Return what was sampled: see :class:`~areal.inference.gateway.recording.Recording`."""
        return self._recording.sequences()

    def stats(self, sampled: Sequence[SampledSequence]) -> dict[str, float]:
        """Return numbers to log with the sequences of :meth:`sequences`: ``requests``, ``refused`` requests, and ``sequences``."""
        requests = self.counts["requests"]
        return {"requests": requests, "refused": self.counts.total() - requests, "sequences": len(sampled)}

    @property
    def ended(self) -> bool:
        """True if no further request is answered."""
        return self._ended is not None

    @property
    def busy(self) -> bool:
        """True if a request is being answered."""
        return bool(self._running)

    def end(self, why: str = "it has ended") -> None:
        """Answer no further request, and cancel those under way."""
        self._ended = self._ended or why
        for task in self._running:
            task.cancel()

    def conversation(self, chat: Chat, messages: Sequence[Message]) -> Conversation:
        """Return the conversation that messages continue, or a new one.

        Raises:
            RequestError: the template refuses the messages.
        """
        try:
            return self._history.conversation(chat, messages)
        except ValueError as error:
            raise RequestError(400, "invalid_messages", str(error), "messages") from None

    async def answers(
        self, chat: Chat, talk: Conversation, sampling: Sampling, n: int
    ) -> list[tuple[Completion, ParsedAnswer]]:
        """Return ``n`` answers to a conversation. Raises what :meth:`complete` raises."""
        stops = dict.fromkeys([*(sampling.stop_token_ids or ()), *chat.stop_token_ids])
        answers = []
        for completion in await self.complete([talk.tokens], replace(sampling, stop_token_ids=tuple(stops)), n):
            branch = talk.fork()
            answers.append((completion, branch.answer(completion, sampling.stop)))
            self._history.add(chat, branch)
        return answers

    async def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int = 1) -> list[Completion]:
        """Return ``n`` answers to each prompt, and record them.

        Raises:
            RequestError: the session has ended, has used its requests, or the prompt is too long.
        """
        self.check_open()  # again: others may have come since the request was read
        asked = [prompt for prompt in prompts for _ in range(n)]
        seeds = [sampling.seed if sampling.seed is None else sampling.seed + number for number in range(len(asked))]
        requests = (
            self._client.generate(p, replace(sampling, seed=seed)) for p, seed in zip(asked, seeds, strict=True)
        )
        completions = await self._unless_ended(gather_or_cancel(requests))
        for prompt, completion in zip(asked, completions, strict=True):
            known = completion if completion.sampling is not None else replace(completion, sampling=sampling)
            self._recording.add(prompt, known)
        self.counts["requests"] += 1
        return completions

    def check_open(self) -> None:
        """Raise a :class:`RequestError` if no further request is answered."""
        if self._ended is not None:
            raise RequestError(
                410, "session_ended", f"session {self.id[:6]}...: {self._ended}; it answers no further request"
            )
        if self._max_requests is not None and self.counts["requests"] + len(self._running) >= self._max_requests:
            raise RequestError(
                410,
                "too_many_requests",
                f"session {self.id[:6]}...: it has had max_requests = {self._max_requests} requests, with those under way",
            )

    async def _unless_ended(self, work: Coroutine[Any, Any, R]) -> R:
        """Await, until the session ends or the caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._ended is not None:
                self.check_open()
            raise
        except ValueError as error:
            raise _refused_prompt(str(error)) from None
        finally:
            task.cancel()
            self._running.discard(task)


def _refused_prompt(text: str) -> RequestError:
    """Return the error of a prompt that the rollout refused. Agents know one that is too long by OpenAI's code and words."""
    if "context" in text:
        return RequestError(
            400, "context_length_exceeded", f"beyond the maximum context length of the model: {text}", "messages"
        )
    return RequestError(400, "invalid_prompt", text)
