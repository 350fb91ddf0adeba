"""A conversation that a model continues."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from areal.chat.answer import Message, ParsedAnswer
from areal.chat.template import MARK, common
from areal.utils.data.image_prompt import ImagePrompt, Prompt, prompt_images, prompt_tokens
from areal.utils.data.sequences import Segment

if TYPE_CHECKING:
    from areal.chat.chat import Chat


class Sampled(Protocol):
    """A sampled answer, such as :class:`areal.inference.protocol.Completion`."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids."""

    def after(self, prompt: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return the segments of the prompt and of the answer, with what is known of each token."""


class Conversation:
    """Tokens of a conversation that a model continues: extended by what was sampled and by new messages, and never tokenised again.

    Args:
        chat: template and tools.
        messages: first messages.
        rewrites: if the template renders earlier turns otherwise once new messages follow, such as without their reasoning: ``"error"``
            raises, and ``"keep"`` keeps the tokens that were sampled.

    Attributes:
        messages: all messages.
        segments: all tokens. Those of answers are trainable.
        images: pictures of all messages as keys of a sample; see :meth:`areal.chat.Chat.images`.
        answers: parsed answers.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message], rewrites: Literal["error", "keep"]) -> None:
        if rewrites not in ("error", "keep"):
            raise ValueError(f"rewrites = {rewrites!r}: choose 'error' or 'keep'")
        self._chat, self._rewrites = chat, rewrites
        self.messages = list(messages)
        prompt = chat.rollout_prompt(messages)
        self.segments: tuple[Segment, ...] = (Segment(list(prompt_tokens(prompt)), trainable=False),)
        self.images = prompt_images(prompt)
        self.answers: list[ParsedAnswer] = []

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [int(token) for segment in self.segments for token in segment.tokens]

    @property
    def prompt(self) -> Prompt:
        """The prompt of the next answer, as clients of rollouts take it: all tokens, with the pictures if there are some."""
        return ImagePrompt(tuple(self.tokens), self.images) if self.images else self.tokens

    def fork(self) -> Conversation:
        """Return a copy, which can be continued otherwise."""
        other = copy.copy(self)
        other.messages, other.answers = list(self.messages), list(self.answers)
        return other

    def answer(self, sampled: Sampled, stop: Sequence[str] = ()) -> ParsedAnswer:
        """Append a sampled answer, and parse its text up to the first of the strings ``stop``. Calls without an identifier get one."""
        self._expect_answer(True)
        answer = self._chat.parse(sampled.tokens, stop)
        used = {call.get("id") for message in self.messages for call in message.get("tool_calls") or ()}
        used.update(call.id for call in answer.tool_calls)
        # Nine characters, as some templates want.
        free = (name for i in count() if (name := f"call{i:05}") not in used)
        calls = [call if call.id else replace(call, id=next(free)) for call in answer.tool_calls]
        answer = replace(answer, tool_calls=tuple(calls))
        self.segments = sampled.after(self.segments)
        self.messages.append(answer.message())
        self.answers.append(answer)
        return answer

    def add(self, *messages: Message) -> None:
        """Append messages, such as results of tools, and the header of the next answer. An answer without an end gets one, untrained.

        Raises:
            ValueError: there is no answer before; a message is an answer; the template refuses the messages, or renders earlier turns
                otherwise (see ``rewrites``). Nothing was changed.
        """
        self._expect_answer(False)
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("messages: pass at least one, and none of the role 'assistant', which answer() appends")
        images = self._chat.images(messages)
        ids = self._chat.with_places(self._following(messages), images)
        complete = self.answers[-1].complete
        self.images = {**self.images, **{key: _appended(self.images.get(key), x) for key, x in images.items()}}
        self.segments = (*self.segments, Segment(ids[1:] if complete else ids, trainable=False))
        self.messages.extend(messages)

    def _expect_answer(self, expected: bool) -> None:
        last = self.messages[-1]["role"] if self.answers else ""
        if expected and last == "assistant":
            raise ValueError("the last message is an answer: add() a message before the next one")
        if not expected and last != "assistant":
            raise ValueError("the last message is no answer: append one with answer() first")

    def _following(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens behind the text of the last answer: its end-of-turn token, the new messages and a header."""
        found = self._behind(self.messages, messages)
        if found is None and self._rewrites == "keep":
            # What follows an answer does not depend on its text: one is rendered that no template rewrites.
            plain = [*self.messages[:-1], {"role": "assistant", "content": MARK}]
            found = self._behind(plain, messages, MARK)
        if found is None:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template renders earlier turns otherwise once messages of the roles {roles} follow, so that the next prompt would "
                "not begin with the tokens that were sampled: start another conversation with these messages, or pass rewrites='keep'"
            )
        return found

    def _behind(self, earlier: Sequence[Message], new: Sequence[Message], mark: str = "") -> list[int] | None:
        """Return the tokens from the end of the last earlier turn on; ``None`` if the new messages change what is before.

        With ``mark``, the last turn has this text, and only what is behind it is compared.
        """
        template = self._chat.template
        before, after = template.text(earlier), template.text([*earlier, *new], prompt=True)
        prompt = template.text(earlier[:-1], prompt=True)
        begin = len(prompt)
        if mark:
            if mark not in after:
                return None
            before, after, begin = before[before.rindex(mark) :], after[after.rindex(mark) :], len(mark)
        elif not before.startswith(prompt):
            return None
        same = common(before, after)
        tokens = template.spans(after)
        stops = self._chat.stop_token_ids
        ends = [k for k, (token, start, end) in enumerate(tokens) if token in stops and begin <= start < end <= same]
        if not ends and same == len(before):
            # The header of the next turn ends the answer.
            ends = [k for k, (token, start, _) in enumerate(tokens) if token in stops and start == same]
        if not ends and mark:
            # Another token ends an answer that is not the last one, as in gpt-oss.
            ends = [k for k, (_, start, _) in enumerate(tokens) if start == begin]
        return [token for token, _, _ in tokens[ends[-1] :]] if ends else None


def _appended(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else torch.cat([first, second])
