"""Limits of turns and tokens of an episode that is a conversation."""

from __future__ import annotations

from dataclasses import replace

from areal.chat import Chat, Conversation, ParsedAnswer
from areal.inference.protocol import RolloutClient, Sampling


class TurnLimits:
    """Limits of an episode of turns, and the sampling parameters of its answers.

    Args:
        chat: template of the model. Its stop tokens end an answer.
        sampling: sampling parameters of a turn, without strings that end it.
        max_turns: maximum number of answers.
        max_tokens: maximum number of sampled tokens of an episode; ``None`` for no limit.

    Raises:
        ValueError: a number is out of range, or strings would end an answer.
    """

    def __init__(self, chat: Chat, sampling: Sampling, max_turns: int, max_tokens: int | None) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns = {max_turns}: it must be at least 1")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: it must be at least 1, or None for no limit")
        if sampling.stop:
            raise ValueError(
                f"Sampling.stop = {sampling.stop!r}: an answer of a chat ends at a stop token of its template, and one that a string "
                "ends would count as cut off; leave stop out"
            )
        self._sampling = replace(sampling, stop_token_ids=chat.stop_token_ids)
        self._max_turns, self._max_tokens = max_turns, max_tokens

    async def answer(self, client: RolloutClient, talk: Conversation) -> ParsedAnswer:
        """Generate the next answer of a conversation within the limits."""
        count = min(self._sampling.max_new_tokens, self._left(talk))
        return talk.answer(await client.generate(talk.prompt, replace(self._sampling, max_new_tokens=count)))

    def reached(self, talk: Conversation) -> bool:
        """Return whether the last answer is the last of the episode: incomplete, or at the limit of turns or tokens."""
        return not talk.answers[-1].complete or len(talk.answers) >= self._max_turns or not self._left(talk)

    def _left(self, talk: Conversation) -> int:
        """Return the number of tokens that may still be sampled."""
        if self._max_tokens is None:
            return self._sampling.max_new_tokens
        used = sum(len(segment.tokens) for segment in talk.segments if segment.trainable)
        return max(self._max_tokens - used, 0)
