"""Episodes of several turns in which the model calls tools."""

from __future__ import annotations

import asyncio
import collections.abc
from collections.abc import Callable
from typing import Any, Literal

from areal.chat import Chat, ToolCall
from areal.chat.answer import Message
from areal.inference.protocol import RolloutClient, Sampling
from areal.trainer.rollout.call_pool import CallPool, is_async
from areal.trainer.rollout.rewards import RewardPool
from areal.trainer.rollout.sequence import Sequence
from areal.trainer.rollout.turn_limits import TurnLimits

_SHOWN = 1000
"""Maximum number of characters of an error that the model reads."""


class ToolPool(CallPool):
    """Pool of calls of a tool: ``await pool(call)``."""

    noun = "tool"

    def describe(self, argument: Any) -> str:
        return f"the call {argument}"


class ToolEpisode:
    """Episode in which the model may call tools before it answers. Calls of one turn run at the same time.

    A call that fails, takes too long, names no tool or cannot be parsed has an error as its result, which the model reads. Means are
    logged: ``turns``, ``tool_calls`` and ``tool_errors`` of an episode.

    Args:
        chat: template of the model, made with the same tools.
        tools: functions with the names that the chat has. A coroutine runs on the event loop, another function in threads. Results are
            strings, or become JSON.
        messages: function from an item to the first messages.
        reward: function from an item and all messages to a number, or a :class:`~areal.trainer.rollout.rewards.RewardPool`.
        sampling: of each turn. Its stop tokens are those of the chat; it has no ``stop`` strings.
        max_turns: maximum number of answers.
        max_tokens: maximum number of sampled tokens of an episode; ``None`` for no limit.
        tool_seconds: time limit of a call.
        processes: call tools in processes instead of threads: see :class:`~areal.trainer.rollout.call_pool.CallPool`.
        rewrites: for a template that changes earlier turns: see :class:`~areal.chat.Conversation`.

    Raises:
        ValueError: tools and chat differ, or a number is out of range.
    """

    def __init__(
        self,
        chat: Chat,
        tools: collections.abc.Sequence[Callable[..., Any]],
        messages: Callable[[Any], list[Message]],
        reward: Callable[..., Any],
        sampling: Sampling,
        *,
        max_turns: int = 8,
        max_tokens: int | None = None,
        tool_seconds: float = 60.0,
        processes: bool = False,
        rewrites: Literal["error", "keep"] = "error",
    ) -> None:
        names = sorted(tool.__name__ for tool in tools)
        if names != sorted(chat.tools):
            raise ValueError(f"tools = {names}, and the chat has {sorted(chat.tools)}: make it with the same tools")
        self._chat, self._messages, self._rewrites = chat, messages, rewrites
        self._pools = {
            # Coroutines run on the event loop.
            tool.__name__: ToolPool(_Called(tool), seconds=tool_seconds, processes=processes and not is_async(tool))
            for tool in tools
        }
        self._rewards = reward if isinstance(reward, RewardPool) else RewardPool(reward)
        self._limits = TurnLimits(chat, sampling, max_turns, max_tokens)

    async def run(self, client: RolloutClient, item: Any) -> list[Sequence]:
        """Generate answers and call tools until an answer is without calls, or a limit is reached."""
        talk = self._chat.start(self._messages(item), self._rewrites)
        errors = 0
        while True:
            answer = await self._limits.answer(client, talk)
            if not (answer.tool_calls or answer.errors) or self._limits.reached(talk):
                break
            results = await asyncio.gather(*(self._result(call) for call in answer.tool_calls))
            # A call of an unknown tool has a result with its error.
            unparsed = answer.errors[
                : len(answer.errors) - sum(call.name not in self._pools for call in answer.tool_calls)
            ]
            errors += len(unparsed) + sum(failed for _, failed in results)
            talk.add(
                *(message for message, _ in results), *({"role": "tool", "content": _error(text)} for text in unparsed)
            )
        calls = sum(len(answer.tool_calls) for answer in talk.answers)
        stats: dict[str, float] = {"turns": len(talk.answers), "tool_calls": calls, "tool_errors": errors}
        reward = await self._rewards(item, talk.messages)
        truncated = not talk.answers[-1].complete
        return [Sequence(talk.segments, reward, truncated=truncated, stats=stats, images=talk.images)]

    def close(self) -> None:
        """Release the threads of tools and reward. Called when a runner closes; others may still use the episode."""
        for pool in (*self._pools.values(), self._rewards):
            pool.close()

    async def _result(self, call: ToolCall) -> tuple[Message, bool]:
        """Return the message with the result of a call, and whether it failed."""
        if call.name not in self._pools:
            return call.result(_error(self._chat.unknown(call.name))), True
        try:
            return call.result(await self._pools[call.name](call)), False
        except Exception as error:
            return call.result(_error(f"{type(error).__name__}: {error}")), True


class _Called:
    """A tool as a function of a call."""

    def __init__(self, tool: Callable[..., Any]) -> None:
        self.tool = tool

    def __call__(self, call: ToolCall) -> Any:
        return self.tool(**call.arguments)


def _error(text: str) -> str:
    return f"Error: {text[:_SHOWN]}"
