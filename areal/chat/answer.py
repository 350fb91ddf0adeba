"""An answer of a model, parsed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""Message in the form of OpenAI's chat interface: ``role``, ``content``, and optionally ``reasoning_content`` and ``tool_calls``."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that a model asked for.

    Attributes:
        name: name of the tool.
        arguments: values by parameter.
        id: identifier, unique within its conversation.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""

    def message(self) -> Message:
        """Return the call as an entry of ``tool_calls``."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {"id": self.id, **call} if self.id else call

    def result(self, value: Any) -> Message:
        """Return the message with the result of the call: a string, or a value that becomes JSON."""
        text = value if isinstance(value, str) else json.dumps(value)
        return {"role": "tool", "name": self.name, "content": text, **({"tool_call_id": self.id} if self.id else {})}


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer of a model.

    Attributes:
        content: text without reasoning and calls.
        reasoning: text of the reasoning; ``None`` without one.
        tool_calls: calls that were parsed.
        errors: for each call that could not be parsed, what is wrong with it. Its text is part of ``content``.
        complete: False if the answer has no end-of-turn token, such as at the limit of tokens.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    complete: bool = True

    def message(self) -> Message:
        """Return the answer as a message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


@dataclass
class ParsedCalls:
    """Calls found in a text.

    Attributes:
        calls: parsed.
        errors: of those that could not be parsed.
        rest: the text without the parsed calls.
    """

    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rest: str = ""
