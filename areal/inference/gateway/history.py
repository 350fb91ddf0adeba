"""Conversations of a session, by their messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from areal.chat import Chat, Conversation
from areal.chat.answer import Message


class MessageHistory:
    """Conversations that a program may continue, by sending their messages and further ones.

    Args:
        rewrites: if the chat template renders earlier turns otherwise once new messages follow: ``"new"`` begins another sequence with the
            tokens of the template, and ``"keep"`` continues with the tokens that were sampled.
    """

    def __init__(self, rewrites: Literal["new", "keep"]) -> None:
        self._rewrites: Literal["error", "keep"] = "keep" if rewrites == "keep" else "error"
        self._conversations: list[tuple[Chat, Conversation]] = []

    def conversation(self, chat: Chat, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with these messages. It continues the longest one that was added, with whose messages they begin.

        Raises:
            ValueError: the template refuses the messages.
        """
        known = [talk for made, talk in self._conversations if made is chat and _begins(messages, talk.messages)]
        if known:
            longest = max(known, key=lambda talk: len(talk.messages))
            talk = longest.fork()
            try:
                talk.add(*messages[len(talk.messages) :])
                return talk
            except ValueError:
                pass  # the template renders earlier turns otherwise, or the program added an answer of its own
        return chat.start(messages, self._rewrites)

    def add(self, chat: Chat, conversation: Conversation) -> None:
        """Keep a conversation that ends with an answer."""
        self._conversations.append((chat, conversation))


def _begins(messages: Sequence[Message], earlier: Sequence[Message]) -> bool:
    """Return True if messages begin with those of a conversation, and go on."""
    return len(messages) > len(earlier) and all(map(_same, messages, earlier))


def _same(sent: Message, known: Message) -> bool:
    """Return True if a program sent a message of a conversation. Programs often leave out the reasoning of an answer."""
    reasoning = sent.get("reasoning_content")
    return (
        sent["role"] == known["role"]
        and _text(sent) == _text(known)
        and _calls(sent) == _calls(known)
        and sent.get("tool_call_id") == known.get("tool_call_id")
        and (reasoning is None or reasoning == known.get("reasoning_content"))
    )


def _text(message: Message) -> str:
    return str(message.get("content") or "").strip()


def _calls(message: Message) -> list[tuple[str, Any]]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        calls.append((function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
    return calls
