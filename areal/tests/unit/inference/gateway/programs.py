"""A gateway with a scripted model, and requests of a program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from transformers.utils import get_json_schema

from areal.chat import Chat, ToolCall
from areal.chat.answer import ParsedAnswer
from areal.inference.gateway import Gateway, Session
from areal.inference.protocol import Completion, Sampling
from areal.tests.harness.limits import PROMPTLY
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.agents import answer_of, calculator, sampled
from areal.tests.unit.chat.tokenizers import chat_tokenizer

TOOLS = [get_json_schema(calculator)]
USER = {"role": "user", "content": "What is 2+2?"}


class Model:
    """Client that samples given answers, or never answers, and keeps what it was asked."""

    version = 0

    def __init__(self, *answers: list[int]) -> None:
        self.answers, self.prompts, self.samplings = answers, list[list[int]](), list[Sampling]()
        self.cancelled = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        if not self.answers:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return sampled(self.answers[(len(self.prompts) - 1) % len(self.answers)])


def tokenizer(template: str = templates.CHATML) -> Any:
    return chat_tokenizer(template)


def written(content: str = "", *calls: ToolCall, template: str = templates.CHATML, **message: Any) -> list[int]:
    """Return the tokens with which a model writes an answer."""
    chat = Chat(chat_tokenizer(template), [calculator] if calls else [])
    return answer_of(chat, {**ParsedAnswer(content, tool_calls=calls).message(), **message})


@asynccontextmanager
async def served(
    model: Any, template: str = templates.CHATML, **options: Any
) -> AsyncIterator[tuple[Gateway, Session, httpx2.AsyncClient]]:
    """Serve a model, with a session and a client of its URL."""
    gateway = Gateway(tokenizer(template), options.pop("sampling", Sampling(64)), **options)
    async with gateway:
        with gateway.session(model) as session:
            async with httpx2.AsyncClient(base_url=session.base_url, timeout=PROMPTLY) as http:
                yield gateway, session, http


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test on an event loop, within the limit."""
    asyncio.run(asyncio.wait_for(work(), PROMPTLY))


async def ask(http: httpx2.AsyncClient, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the reply to messages."""
    reply = await http.post("/chat/completions", json={"model": "policy", "messages": list(messages), **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def decoded(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens))
