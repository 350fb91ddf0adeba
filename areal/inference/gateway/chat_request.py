"""Request of ``/v1/chat/completions``, in the form of OpenAI's interface.

Source: https://platform.openai.com/docs/api-reference/chat/create, and the fields ``chat_template_kwargs`` and ``return_token_ids`` of vLLM.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from areal.chat.answer import Message
from areal.inference.gateway.drawing import Drawing
from areal.inference.gateway.request_error import RequestError, refused
from areal.inference.protocol import Sampling


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: bool = False


class SentMessage(BaseModel):
    """A message. Further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Drawing):
    """A request for answers to messages."""

    messages: list[SentMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def used_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call.

        Raises:
            RequestError: a call is demanded, which sampling cannot promise.
        """
        if self.tool_choice not in (None, "auto", "none"):
            raise refused(
                "tool_choice", self.tool_choice, "a call that is forced cannot be trained on; pass 'auto' or 'none'"
            )
        return [] if self.tool_choice == "none" else self.tools or []

    def template_options(self) -> dict[str, Any]:
        """Return further variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def sampling(self, default: Sampling, *, fixed: bool) -> Sampling:
        """See :meth:`Drawing.sampling`."""
        limit = self.max_completion_tokens or self.max_tokens
        asked = self.model_copy(update={"max_tokens": limit})
        return replace(Drawing.sampling(asked, default, fixed=fixed), top_logprobs=self.top_logprobs or 0)

    def sent_messages(self) -> list[Message]:
        """Return the messages as a chat template takes them: content as text, and names of the tools at their results.

        Raises:
            RequestError: a message has parts that are no text, arguments that are no JSON, or the last one is an answer.
        """
        names: dict[str, str] = {}
        messages = []
        for number, sent in enumerate(self.messages):
            message = {name: value for name, value in sent.model_dump().items() if value is not None}
            message["role"] = "system" if sent.role == "developer" else sent.role
            message["content"] = _text(number, sent.content)
            for call in message.get("tool_calls") or ():
                _check_call(number, call)
                names[str(call.get("id"))] = call["function"]["name"]
            if sent.role == "tool" and str(message.get("tool_call_id")) in names:
                message.setdefault("name", names[str(message["tool_call_id"])])
            messages.append(message)
        if messages[-1]["role"] == "assistant":
            raise refused("messages", "... 'assistant'", "an answer cannot be continued; end with another message")
        return messages


def _text(number: int, content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message."""
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if not isinstance(part.get("text"), str):
            raise refused(f"messages[{number}].content", part.get("type"), "only text can be trained on; leave it out")
    return "".join(part["text"] for part in content)


def _check_call(number: int, call: Any) -> None:
    """Raise a :class:`RequestError` unless a call has a name and arguments."""
    try:
        arguments = call["function"]["arguments"]
        str(call["function"]["name"])
        json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            400,
            "invalid_call",
            f"messages[{number}].tool_calls: {call!r} has no name and JSON arguments ({error})",
            "messages",
        ) from None
