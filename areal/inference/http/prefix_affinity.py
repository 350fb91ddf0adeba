"""Which server has the keys and values of a prompt's prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

_BLOCK = 64
"""Tokens of a block. Prefixes are compared block by block."""
_REMEMBERED = 2**16
"""Maximum number of prefixes."""


class Affinity:
    """Remembers the server that last had a prefix: answers of one group, and the turns of one episode, share theirs."""

    def __init__(self) -> None:
        self._places: OrderedDict[int, str] = OrderedDict()

    def find(self, prompt: Sequence[int]) -> str | None:
        """Return the URL of the server with the longest prefix of a prompt."""
        found = None
        # From the shortest prefix: the last that is known is the longest.
        for key in _prefixes(prompt):
            found = self._places.get(key, found)
        return found

    def note(self, prompt: Sequence[int], url: str) -> None:
        """Record that a server computes a prompt."""
        for key in _prefixes(prompt):
            self._places[key] = url
            self._places.move_to_end(key)
        while len(self._places) > _REMEMBERED:
            self._places.popitem(last=False)


def _prefixes(prompt: Sequence[int]) -> Iterator[int]:
    """Yield a key of each prefix that ends with a block, from the shortest; the last is the whole prompt."""
    key = 0
    for start in range(0, len(prompt), _BLOCK):
        key = hash((key, *prompt[start : start + _BLOCK]))
        yield key
