"""Stop strings: text that ends an answer, however it is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BEFORE = 4
"""Tokens decoded in addition, because the first ones may lose a leading space, or begin within a character of up to four bytes."""


class StopStrings:
    """Finds stop strings in the text of an answer.

    Args:
        tokenizer: tokenizer of the model.
        strings: stop strings, not empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        # Every token has at least one byte.
        self._window = max(len(string.encode()) for string in strings) + _BEFORE

    def end(self, tokens: Sequence[int]) -> bool:
        """Return whether one of the strings is in the text of the last tokens. Call it after each token.

        Args:
            tokens: the answer so far.
        """
        text = self._tokenizer.decode(
            list(tokens[-self._window :]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self._strings)
