"""Messages as plain text, for base models without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal.chat.answer import Message, ParsedAnswer
from areal.chat.pictures import pictures_of
from areal.utils.data.image_prompt import Prompt
from areal.utils.data.sequences import Segment, from_segments


class Text:
    """Prompts, samples and answers as plain text, with the methods of :class:`areal.chat.Chat` that recipes use.

    The contents of the messages of a prompt are joined by line breaks. An answer follows at once, as in TRL: a space or a line break between
    both is part of the row. It ends with the end-of-sequence token. Prompt and answer are tokenised apart: the tokens of a prompt do not
    depend on its answer.

    Args:
        tokenizer: has an end-of-sequence token.

    Raises:
        ValueError: it has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("text = True: the tokenizer has no end-of-sequence token, which ends an answer")
        self._tokenizer = tokenizer
        self._end = int(tokenizer.eos_token_id)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token."""
        return (self._end,)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens before an answer. An earlier answer is part of the text."""
        return self._ids("\n".join(str(message["content"]) for message in messages), first=True)

    def rollout_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Return the tokens before an answer.

        Raises:
            ValueError: a message has a picture.
        """
        if pictures_of(messages):
            raise ValueError("text = True with a picture in a prompt: plain text has none; use a chat template")
        return self.prompt(messages)

    def segments(self, messages: Sequence[Message], train: Literal["all", "last"] = "all") -> tuple[Segment, ...]:
        """Return the tokens of a conversation of one answer, at its end. Trained are the answer and the end-of-sequence token.

        Raises:
            ValueError: the answer is not the last message, or there are several.
        """
        roles = [message["role"] for message in messages]
        if roles[-1:] != ["assistant"] or (train == "all" and roles.count("assistant") > 1):
            raise ValueError(
                f"text = True with messages of the roles {', '.join(roles)}: plain text has one answer, at the end"
            )
        answer = [*self._ids(str(messages[-1]["content"]), first=False), self._end]
        return Segment(self.prompt(messages[:-1]), trainable=False), Segment(answer, trainable=True)

    def sample(self, messages: Sequence[Message], train: Literal["all", "last"] = "all") -> dict[str, Tensor]:
        """Return a conversation as a sample for supervised fine-tuning: ``input_ids`` and ``loss_mask``."""
        return from_segments(self.segments(messages, train))

    def parse(self, tokens: Sequence[int], stop: Sequence[str] = ()) -> ParsedAnswer:
        """Return the text of an answer."""
        complete = bool(tokens) and tokens[-1] == self._end
        text: Any = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return ParsedAnswer(content=str(text), complete=complete)

    def _ids(self, text: str, *, first: bool) -> list[int]:
        ids: Any = self._tokenizer(text, add_special_tokens=first)["input_ids"]
        # A tokenizer may end every text itself.
        return list(ids[:-1] if first and ids[-1:] == [self._end] else ids)
