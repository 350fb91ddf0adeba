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
        return self._is_in(tokens[-self._window :])

    def find(self, tokens: Sequence[int], start: int) -> int | None:
        """Return the number of tokens up to the one that completes a string; ``None`` if there is none.

        Args:
            tokens: the answer so far.
            start: number of tokens that were searched before.
        """
        # One look at the text spares those after each token.
        if not self._is_in(tokens[max(0, start - self._window) :]):
            return None
        return next((count for count in range(start + 1, len(tokens) + 1) if self.end(tokens[:count])), None)

    def _is_in(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)
