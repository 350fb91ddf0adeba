"""Messages to tokens, and tokens to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from areal.chat.answer import Message, ParsedAnswer
from areal.chat.answer_format import AnswerFormat
from areal.chat.call_format import Parser
from areal.chat.conversation import Conversation
from areal.chat.parameters import types_of
from areal.chat.pictures import Pictures, pictures_of
from areal.chat.template import Template, common, cut
from areal.utils.data.image_prompt import ImagePrompt, Prompt, prompt_tokens
from areal.utils.data.sequences import Segment, from_segments

_T = TypeVar("_T")


class Chat:
    """Prompts, supervised samples, parsed answers and running conversations by a tokenizer's own chat template.

    The forms of reasoning and of calls are learned from the template, by rendering answers with known content.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        tools: functions with types and docstrings (see ``transformers.utils.get_json_schema``), or JSON schemas.
        parse_calls: reads the calls in the text of an answer. Defaults to the form that was learned.
        pictures: reads the pictures of messages; ``None`` refuses them.
        options: further variables of the template, such as ``enable_thinking=False``.

    Raises:
        ValueError: the tokenizer has no chat template or no offsets; or there are tools, and the template renders no calls, or in a form that
            was not learned.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Any] = (),
        *,
        parse_calls: Parser | None = None,
        pictures: Pictures | None = None,
        **options: Any,
    ) -> None:
        self._pictures = pictures
        schemas = [get_json_schema(tool) if callable(tool) else tool for tool in tools]
        self.template = Template(tokenizer, schemas, options, str if pictures is None else pictures.expanded)
        self._parse_calls = parse_calls
        self._types = {tool["function"]["name"]: types_of(tool) for tool in schemas}
        self._format = AnswerFormat.of(self.template)
        if schemas and parse_calls is None and self._format.calls is None:
            raise ValueError(
                f"tools = {sorted(self._types)}: its calls are not rendered, or in a form that was not learned: pass parse_calls"
            )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, for :class:`areal.inference.Sampling`."""
        return self.template.stop_token_ids

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools."""
        return tuple(self._types)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation and the header of the next answer, as ``apply_chat_template`` does.

        Raises:
            ValueError: the template refuses the messages, or the image processor a picture.
        """
        return list(prompt_tokens(self.rollout_prompt(messages)))

    def rollout_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Return what :meth:`prompt` does, with the pictures of the messages if they have some, as clients of rollouts take it."""
        images = self.images(messages)
        ids = self.with_places(self.template.ids(self.template.text(messages, prompt=True)), images)
        return ImagePrompt(tuple(ids), images) if images else ids

    def images(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        """Return the pictures of messages as keys of a sample (see :meth:`Pictures.inputs`); nothing without pictures.

        Raises:
            ValueError: the image processor refuses a picture, or there is none.
        """
        if self._pictures is not None:
            return self._pictures.inputs(messages)
        if pictures_of(messages):
            raise ValueError(
                "messages has a picture, and this Chat reads none: pass pictures=Pictures(processor, token)"
            )
        return {}

    def with_places(self, ids: Sequence[int], images: dict[str, Tensor]) -> list[int]:
        """Return rendered tokens, with a token for each part of these pictures."""
        if self._pictures is None:
            return list(ids)
        return _repeated(ids, self._pictures.repeats(ids, images))

    def start(self, messages: Sequence[Message], rewrites: Literal["error", "keep"] = "error") -> Conversation:
        """Begin a conversation that a model continues: see :class:`Conversation`."""
        return Conversation(self, messages, rewrites)

    def parse(self, tokens: Sequence[int], stop: Sequence[str] = ()) -> ParsedAnswer:
        """Parse a sampled answer, up to the first of the strings ``stop``."""
        ids = list(tokens)
        complete = bool(ids) and ids[-1] in self.stop_token_ids
        # Without special tokens skipped: they delimit reasoning and calls.
        kept = ids[:-1] if complete else ids
        text = str(self.template.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        text = cut(text, stop)
        if self._parse_calls is None:
            answer = self._format.parse(text, self._types, complete=complete)
        else:
            calls = self._parse_calls(text)
            answer = replace(self._format, calls=None).parse(calls.rest, self._types, complete=complete)
            answer = replace(answer, tool_calls=tuple(calls.calls), errors=tuple(calls.errors))
        unknown = [call.name for call in answer.tool_calls if self._types and call.name not in self._types]
        return replace(answer, errors=(*answer.errors, *map(self.unknown, unknown)))

    def unknown(self, name: str) -> str:
        """Return the error of a call that names no tool."""
        return f"tool = {name!r}: choose of {', '.join(self._types)}"

    def segments(
        self,
        messages: Sequence[Message],
        train: Literal["all", "last"] = "all",
        images: dict[str, Tensor] | None = None,
    ) -> tuple[Segment, ...]:
        """Return the tokens of a finished conversation, as ``apply_chat_template`` does, in segments.

        Trained are the answers, from behind the header of the turn to the end-of-turn token: no header, and nothing behind that token.

        Args:
            messages: conversation with at least one message of the role ``assistant``.
            train: all answers, or the last one.
            images: result of :meth:`images`, if it is known.

        Raises:
            ValueError: no message is an answer; the template refuses the messages, or the image processor a picture; or it renders an
                answer otherwise than it asks for it (such as without its reasoning once another turn follows), so that no prompt of the
                model leads to the text.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError("messages has no message of the role 'assistant': there is nothing to train on")
        if train not in ("all", "last"):
            raise ValueError(f"train = {train!r}: choose 'all' or 'last'")
        text = self.template.text(messages)
        tokens = self.template.spans(text)
        trained = [False] * len(tokens)
        for i in answers if train == "all" else answers[-1:]:
            begin, end = self._turn(messages, i, text)
            behind = [k for k, (_, start, _) in enumerate(tokens) if start >= begin]
            closing = next((k for k in behind if tokens[k][0] in self.stop_token_ids and tokens[k][1] <= end), None)
            if closing is None and end < len(text):
                raise self._rewritten(messages[: i + 1], text, i)
            for k in behind:
                trained[k] = closing is None or k <= closing
        ids, images = [token for token, _, _ in tokens], self.images(messages) if images is None else images
        if self._pictures is not None:
            repeats = self._pictures.repeats(ids, images)
            ids, trained = _repeated(ids, repeats), _repeated(trained, repeats)
        return _runs(ids, trained)

    def sample(self, messages: Sequence[Message], train: Literal["all", "last"] = "all") -> dict[str, Tensor]:
        """Return a finished conversation as a sample for supervised fine-tuning: ``input_ids``, ``loss_mask``, and pictures if it has some.

        See :meth:`segments` for what is trained, and for the errors, and :meth:`images` for the keys of pictures.
        """
        images = self.images(messages)
        return {**from_segments(self.segments(messages, train, images)), **images}

    def _turn(self, messages: Sequence[Message], i: int, text: str) -> tuple[int, int]:
        """Return start and end of an answer in the text of the conversation."""
        prompt = self.template.text(messages[:i], prompt=True)
        if not text.startswith(prompt):
            raise self._rewritten(messages[:i], text, i, prompt=True)
        return len(prompt), common(self.template.text(messages[: i + 1]), text)

    def _rewritten(self, messages: Sequence[Message], text: str, i: int, *, prompt: bool = False) -> ValueError:
        """Return the error for an answer that is rendered otherwise once it is finished, or once other turns follow."""
        then = self.template.text(messages, prompt=prompt)
        place = max(common(then, text) - 30, 0)
        return ValueError(
            f"messages[{i}]: the chat template renders {then[place : place + 60]!r} at this turn, and {text[place : place + 60]!r} in the "
            "whole conversation, so that no prompt leads to this answer: train on samples that end with an answer (train='last'), or on the "
            "segments of a Conversation"
        )


def _repeated(values: Sequence[_T], repeats: Sequence[int]) -> list[_T]:
    return [value for value, n in zip(values, repeats, strict=True) for _ in range(n)]


def _runs(ids: list[int], trained: list[bool]) -> tuple[Segment, ...]:
    """Return segments of consecutive tokens that are trained, or are not."""
    cuts = [k for k in range(1, len(ids)) if trained[k] != trained[k - 1]]
    return tuple(
        Segment(ids[a:b], trainable=trained[a]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True) if b > a
    )
