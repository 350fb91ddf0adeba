"""The text of an answer, from what an episode passes to its reward."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from typing import Any, Protocol

from areal.inference.protocol import Completion

AnswerText = Callable[[Any], str]
"""Returns the text to judge, from a :class:`~areal.inference.protocol.Completion` or from all messages of a conversation."""


class Decoder(Protocol):
    """Tokenizer, such as one of transformers."""

    def decode(self, token_ids: collections.abc.Sequence[int], *, skip_special_tokens: bool) -> Any:
        """Return the text of token ids."""


def last_content(answer: Any) -> str:
    """Return the content of the last message, for rewards of ``ToolEpisode``. A string is returned as it is.

    Raises:
        ValueError: ``answer`` is a ``Completion``, whose text only a tokenizer knows, or is no conversation.
    """
    if isinstance(answer, str):
        return answer
    if isinstance(answer, Completion):
        raise ValueError(
            "text = last_content with a Completion, which has token ids only: pass text=decoded(tokenizer)"
        )
    last = answer[-1] if isinstance(answer, collections.abc.Sequence) and answer else None
    content = last.get("content") if isinstance(last, collections.abc.Mapping) else None
    if not isinstance(content, str):
        raise ValueError(
            f"text = last_content with {answer!r:.200}: its last entry is no message with a string as content"
        )
    return content


def decoded(tokenizer: Decoder) -> AnswerText:
    """Return a function from a ``Completion`` to its text without special tokens, for rewards of ``SingleTurn``."""

    def text(answer: Completion) -> str:
        return str(tokenizer.decode(answer.tokens, skip_special_tokens=True))

    return text
