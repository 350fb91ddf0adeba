"""A calculator, a forecast, and answers that a test writes."""

from __future__ import annotations

import collections.abc
from typing import Any

from areal.chat import Chat
from areal.inference.protocol import Completion, Sampling
from areal.tests.unit.chat.tokenizers import chat_tokenizer

USER = {"role": "user", "content": "What is 2+2?"}
FORECAST = {"city": "Oslo, the city", "days": 3, "hourly": True}


def calculator(expression: str) -> str:
    """Compute an expression.

    Args:
        expression: sum, such as 2+2.
    """
    return str(sum(int(each) for each in expression.split("+")))


def forecast(city: str, days: int, hourly: bool) -> str:
    """Forecast the weather.

    Args:
        city: name of the city.
        days: number of days.
        hourly: by the hour.
    """
    return f"sun in {city}"


TOOLS = (calculator, forecast)


def chat_of(template: str, *tools: Any, **options: Any) -> Chat:
    """Return a chat with a template."""
    return Chat(chat_tokenizer(template), tools, **options)


def sampled(tokens: collections.abc.Sequence[int]) -> Completion:
    """Return tokens as a sampled answer."""
    return Completion(tuple(tokens), (-0.5,) * len(tokens), (3,) * len(tokens), "stop")


def answer_of(chat: Chat, message: dict[str, Any], *earlier: dict[str, Any]) -> list[int]:
    """Return the tokens with which a model answers, according to the template, with an end."""
    segments = chat.segments([*(earlier or (USER,)), {"role": "assistant", "content": "", **message}], train="last")
    tokens = [int(token) for token in segments[-1 if segments[-1].trainable else -2].tokens]
    by_header = chat.stop_token_ids[-2:-1] if message.get("tool_calls") else chat.stop_token_ids[:1]
    return tokens if tokens[-1] in chat.stop_token_ids else [*tokens, *by_header]


class Scripted:
    """A client that samples given answers, again and again, and keeps the prompts and parameters of its requests."""

    version = 0

    def __init__(self, *answers: list[int]) -> None:
        self.answers, self.requests = answers, list[tuple[list[int], Sampling]]()

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.requests.append((prompt_ids, sampling))
        return sampled(self.answers[(len(self.requests) - 1) % len(self.answers)])
