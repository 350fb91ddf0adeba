"""The stream that a model sees: sequences end to end, or branches of a tree, and padding behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.api.microbatch import PrefixTree
from areal.engine.attention.kernels import Segments


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Runs of tokens, end to end, each of which sees itself and the path to it.

    Attributes:
        own: tokens of each. They sum to the length of the stream.
        whole: tokens from the beginning of its sequence to the end of each.
        paths: for those that have some, int64 ``[whole]``, where all these tokens stand, on the host; the rest see themselves alone.
    """

    own: tuple[int, ...]
    whole: tuple[int, ...]
    paths: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, seqlens: Sequence[int], padded_length: int, tree: PrefixTree | None = None) -> TokenStream:
        """Sequences of these lengths, or a tree of them, padded to a length. Padding is a sequence of its own.

        Raises:
            ValueError: they are longer than that.
        """
        own, whole = (tuple(seqlens), tuple(seqlens)) if tree is None else (tree.own, tree.whole)
        padding = padded_length - sum(own)
        if padding < 0:
            raise ValueError(f"padded_length = {padded_length} is less than the {sum(own)} tokens of the sequences")
        tail = (padding,) if padding else ()
        return cls((*own, *tail), (*whole, *tail), () if tree is None else tree.paths.split(whole))

    def __len__(self) -> int:
        return sum(self.own)

    def positions(self) -> Tensor:
        """Where each token stands in its sequence, int64 ``[S]``, on the host."""
        own = torch.tensor(self.own)
        return torch.arange(len(self)) + (torch.tensor(self.whole) - own.cumsum(0)).repeat_interleave(own)

    def all_paths(self) -> Iterator[Tensor]:
        """For each branch, where all tokens that its last one sees stand, int64, on the host."""
        yield from self.paths
        start = sum(self.own[: len(self.paths)])
        for own in self.own[len(self.paths) :]:
            yield torch.arange(start, start + own)
            start += own

    def segments(self, device: torch.device | str) -> Segments:
        """Of the whole stream."""
        if not self.paths:
            return Segments.of(self.own, device=device)
        return Segments.of(self.own, self.whole, device, keys=torch.cat(list(self.all_paths())))
