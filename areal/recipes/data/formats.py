"""What a row means: a prompt, a finished conversation, or a pair of answers. The names are those of TRL's documentation of data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal.chat import Chat
from areal.chat.answer import Message
from areal.recipes.data.rows import DataRows, Row
from areal.recipes.data.text import Text
from areal.trainer.preference import Pair

_PROMPTS = ("prompt", "question")
_ANSWERS = ("completion", "answer", "response")
_UNDERSTOOD = {
    "prompts": "'messages', or 'prompt' or 'question'",
    "sft": "'messages', or 'prompt' or 'question' with 'completion', 'answer' or 'response'",
    "pairs": "'chosen' and 'rejected', and unless both are whole conversations 'prompt' or 'question'",
}


def prompt_messages(row: Row, system: str = "") -> list[Message]:
    """Return the first messages of a row: of ``messages`` without an answer at the end, or of ``prompt`` or ``question``.

    Args:
        row: strings, or lists of messages.
        system: message before a row that begins with none; empty for none.

    Raises:
        ValueError: the row has no such column, or a message is wrong.
    """
    if "messages" in row:
        messages = _messages("messages", row["messages"], "user")
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
    else:
        name = _present(row, _PROMPTS, "prompts")
        messages = _messages(name, row[name], "user")
    if not messages:
        raise ValueError("the row has no message before the answer")
    return _with_system(messages, system)


def finished_messages(row: Row, system: str = "") -> list[Message]:
    """Return a conversation that ends with an answer: ``messages``, or ``prompt`` with ``completion``.

    Raises:
        ValueError: the row has no such columns, a message is wrong, or no message is an answer.
    """
    if "messages" in row:
        messages = _with_system(_messages("messages", row["messages"], "user"), system)
    else:
        name = _present(row, _ANSWERS, "sft")
        messages = prompt_messages(row, system) + _messages(name, row[name], "assistant")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the row has no message of the role 'assistant': there is nothing to train on")
    return messages


def pair_messages(row: Row, system: str = "") -> tuple[list[Message], list[Message]]:
    """Return two conversations that differ in their end, the better one first.

    Raises:
        ValueError: the row has no such columns, a message is wrong, or the conversations begin differently.
    """
    for name in ("chosen", "rejected"):
        if name not in row:
            raise ValueError(_missing(row, "pairs"))
    chosen, rejected = (_messages(name, row[name], "assistant") for name in ("chosen", "rejected"))
    if any(name in row for name in _PROMPTS):
        prompt = prompt_messages({name: row[name] for name in _PROMPTS if name in row}, "")
        chosen, rejected = (_behind(prompt, answer) for answer in (chosen, rejected))
    return _with_system(chosen, system), _with_system(rejected, system)


def _behind(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """Return a prompt and its answer, which may be a whole conversation that begins with the prompt.

    Raises:
        ValueError: it begins with another question.
    """
    if answer[: len(prompt)] == prompt:
        return answer
    if prompt[-1]["role"] == answer[0]["role"] == "user":
        raise ValueError(
            "chosen or rejected is a conversation that does not begin with the prompt: leave the prompt out"
        )
    return prompt + answer


def pair_of(chat: Chat | Text, row: Row, system: str = "") -> Pair:
    """Return the tokens of a pair. The last message of each conversation is its answer.

    Raises:
        ValueError: see :func:`pair_messages`; or what is before the answers differs.
    """
    chosen, rejected = pair_messages(row, system)
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected differ before their last message: pairs have one prompt")
    prompt = chat.prompt(chosen[:-1])
    answers = []
    for messages in (chosen, rejected):
        (begin, answer, *_) = _last_answer(chat, messages)
        if begin != prompt:
            raise ValueError(
                "the chat template renders the prompt otherwise once the answer follows: use another template"
            )
        answers.append(answer)
    return Pair(prompt, *answers)


def _last_answer(chat: Chat | Text, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Return the tokens before the last answer, and those of the answer."""
    segments = chat.segments(messages, "last")
    last = max(i for i, segment in enumerate(segments) if segment.trainable)
    before = [int(token) for segment in segments[:last] for token in segment.tokens]
    return before, [int(token) for token in segments[last].tokens]


_READ: dict[str, Callable[[Row, str], Any]] = {
    "prompts": prompt_messages,
    "sft": finished_messages,
    "pairs": pair_messages,
}


def check_rows(rows: DataRows, kind: str, system: str = "") -> None:
    """Check that all rows have a format.

    Args:
        rows: the rows.
        kind: ``"prompts"``, ``"sft"`` or ``"pairs"``.
        system: see :func:`prompt_messages`.

    Raises:
        ValueError: names the place of the first row that is wrong.
    """
    read = _READ[kind]
    for number, row in enumerate(rows):
        try:
            read(row, system)
        except ValueError as error:
            raise ValueError(f"{rows.place(number)}: {error}") from None


def _messages(name: str, value: Any, role: str) -> list[Message]:
    """Return messages; a string is one message of a role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is a {type(value).__name__}: expected a string or a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{name}[{number}] = {message!r:.80}: expected a message such as {{'role': 'user', 'content': '…'}}"
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{name}[{number}] = {message!r:.80}: a message has content or tool calls")
    return [dict(message) for message in value]


def _with_system(messages: list[Message], system: str) -> list[Message]:
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _present(row: Row, names: tuple[str, ...], kind: str) -> str:
    found = next((name for name in names if name in row), None)
    if found is None:
        raise ValueError(_missing(row, kind))
    return found


def _missing(row: Row, kind: str) -> str:
    return f"the row has the columns {sorted(row)}, and needs {_UNDERSTOOD[kind]}: name yours in columns = {{...}}"
