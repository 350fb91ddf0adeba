"""A user's reward of a row and a text, as the reward of an episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from areal.chat.answer import Message
from areal.inference.protocol import Completion
from areal.recipes.data.rows import Row
from areal.trainer.rollout.call_pool import is_async

UserReward = Callable[..., Any]
"""Function ``(row, answer)`` or ``(row, answer, messages)`` that returns a number, or a coroutine function: ``answer`` is the text of the last
answer, and ``messages`` is the whole conversation."""


def answer_reward(
    reward: UserReward, text: Callable[[Sequence[int]], str], prompt: Callable[[Row], list[Message]]
) -> Callable[..., Any]:
    """Return the reward of an episode: a function of a row, and of a :class:`~areal.inference.Completion` or all messages.

    Args:
        reward: function of the user.
        text: function from the tokens of an answer to its text.
        prompt: function from a row to its first messages.

    Raises:
        ValueError: ``reward`` is no function, or takes other parameters.
    """
    shows_messages = _takes_messages(reward)
    kind = _AsyncReward if is_async(reward) else _Reward
    return kind(reward, text, prompt, shows_messages)


class _Reward:
    def __init__(
        self,
        reward: UserReward,
        text: Callable[[Sequence[int]], str],
        prompt: Callable[[Row], list[Message]],
        shows_messages: bool,
    ) -> None:
        self._reward, self._text, self._prompt, self._shows_messages = reward, text, prompt, shows_messages

    def __call__(self, row: Row, answered: Completion | list[Message]) -> Any:
        return self._reward(*self._arguments(row, answered))

    def close(self) -> None:
        """Close the reward, if it can be closed."""
        getattr(self._reward, "close", lambda: None)()

    def _arguments(self, row: Row, answered: Completion | list[Message]) -> tuple[Any, ...]:
        if isinstance(answered, Completion):
            text = self._text(answered.tokens)
            messages = [*self._prompt(row), {"role": "assistant", "content": text}] if self._shows_messages else []
        else:
            text, messages = str(answered[-1].get("content") or ""), answered
        return (row, text, messages) if self._shows_messages else (row, text)


class _AsyncReward(_Reward):
    async def __call__(self, row: Row, answered: Completion | list[Message]) -> Any:
        return await self._reward(*self._arguments(row, answered))


def _takes_messages(reward: UserReward) -> bool:
    """Return whether a reward takes the conversation as its third argument."""
    if not callable(reward):
        raise ValueError(f"reward = {reward!r}: pass a function of a row and the text of an answer")
    parameters = inspect.signature(reward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(needed) > 3 or (len(positional) < 2 and not several):
        names = ", ".join(p.name for p in positional)
        raise ValueError(
            f"reward = {getattr(reward, '__name__', reward)}({names}): it is called with (row, answer), or (row, answer, messages)"
        )
    return len(needed) == 3
