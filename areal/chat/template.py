"""A tokenizer's chat template."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from areal.chat.answer import Message, ToolCall

USER: Message = {"role": "user", "content": "Hello."}
MARK = "XMARKX"
"""Text that no template contains."""
CALL = ToolCall(MARK, {MARK: MARK}, "call00001")


class Template:
    """Renders messages to text and tokens with a tokenizer's chat template.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        tools: functions with types and docstrings, or JSON schemas.
        options: further variables of the template, such as ``enable_thinking``.
        rewrite: changes a rendered text to what the model reads.

    Raises:
        ValueError: the tokenizer has no chat template or no offsets, or its template does not end an answer with a special token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Any],
        options: dict[str, Any],
        rewrite: Callable[[str], str] = str,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer = {tokenizer.name_or_path!r}: it has no chat template; set tokenizer.chat_template, or build prompts yourself"
            )
        if not tokenizer.is_fast:
            raise ValueError(f"tokenizer = {type(tokenizer).__name__}: it has no offsets; use its fast form")
        self.tokenizer, self._tools, self._options = tokenizer, list(tools) or None, options
        self._rewrite = rewrite
        self._parts = self._takes_parts()

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render messages. With ``prompt``, the text ends with the header of an answer.

        Raises:
            ValueError: the template refuses the messages.
        """
        # Arguments of calls are JSON in OpenAI's interface, values in most templates, and JSON in some.
        given = [_with_arguments(self._with_parts(message), as_text=False) for message in messages]
        try:
            return self._rendered(given, prompt)
        except (TemplateError, TypeError) as error:
            if any(message.get("tool_calls") for message in messages):
                with contextlib.suppress(TemplateError, TypeError):
                    as_text = [_with_arguments(self._with_parts(message), as_text=True) for message in messages]
                    return self._rendered(as_text, prompt)
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error

    def _rendered(self, messages: list[Message], prompt: bool) -> str:
        rendered = self.tokenizer.apply_chat_template(
            messages, tools=self._tools, tokenize=False, add_generation_prompt=prompt, **self._options
        )
        return self._rewrite(str(rendered))

    def _with_parts(self, message: Message) -> Message:
        """Return a message in the form that the template takes: a text, or a list with a text."""
        content = message.get("content")
        return (
            {**message, "content": [{"type": "text", "text": content}]}
            if self._parts and isinstance(content, str)
            else message
        )

    def _takes_parts(self) -> bool:
        """Return False if the template renders content that is a string.

        Raises:
            ValueError: it renders neither strings nor lists.
        """
        for parts in (False, True):
            self._parts = parts
            with contextlib.suppress(ValueError):
                if MARK in self.text([{"role": "user", "content": MARK}]):
                    return parts
        raise ValueError(
            f"tokenizer = {self.tokenizer.name_or_path!r}: its chat template does not render the text of a message"
        )

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a rendered text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """Return id, start and end of each token of a rendered text."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(token, *span) for token, span in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)]

    def answered(self, message: Message, *, exact: bool = False) -> str | None:
        """Return the text of an answer to a question, behind the header; ``None`` if the template refuses the message.

        With ``exact``, also ``None`` if the text does not begin with the prompt.
        """
        start = self.text([USER], prompt=True)
        try:
            whole = self.text([USER, {"role": "assistant", "content": "", **message}])
        except ValueError:
            return None
        same = common(start, whole)
        return None if exact and same < len(start) else whole[same:]

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: those that the template has behind one, and the tokenizer's end of sequence."""
        found, by_header = self._end({"content": MARK}, USER, None)
        by_call, _ = self._end({"tool_calls": [CALL.message()]}, CALL.result("Done."), by_header)
        ends = [found, by_call, self.tokenizer.eos_token_id]
        stops = tuple(dict.fromkeys(end for end in ends if end is not None))
        if not stops:
            raise ValueError(
                f"tokenizer = {self.tokenizer.name_or_path!r}: its chat template ends an answer without a special token, and it has no "
                "eos_token; set one"
            )
        return stops

    def _end(self, answer: Message, following: Message, by_header: bool | None) -> tuple[int | None, bool | None]:
        """Return the token that ends an answer, and if it begins the header of the next turn, as in GLM.

        Args:
            answer: its text ends with ``MARK``.
            following: next message.
            by_header: known from another answer.
        """
        turns = [USER, {"role": "assistant", "content": "", **answer}]
        try:
            alone, followed = self.text(turns), self.text([*turns, following])
        except ValueError:
            return None, by_header
        if MARK not in alone or MARK not in followed:
            return None, by_header
        alone, followed = (text[text.rindex(MARK) + len(MARK) :] for text in (alone, followed))
        same = common(alone, followed)
        inside, rest = self._specials(alone[:same]), self._specials(followed[same:])
        if by_header is None:
            by_header = not self._specials(alone)
        if by_header:
            return (rest[0] if rest else None), True
        # The last token of the turn, unless it is another one at the end of a conversation.
        return (
            inside[-1] if inside else next(iter(self._specials(alone)[:: 1 if "content" in answer else -1]), None)
        ), False

    def _specials(self, text: str) -> list[int]:
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return [token for token in self.ids(text) if token in special]


def _with_arguments(message: Message, *, as_text: bool) -> Message:
    """Return a message whose calls have their arguments as JSON, or as values."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def cut(text: str, ends: Sequence[str]) -> str:
    """Return the text before the first of some texts; all of it if there is none."""
    return text[: min((text.index(end) for end in ends if end in text), default=len(text))]
