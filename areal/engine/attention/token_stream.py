"""The token stream: all tokens that a model sees of one micro-batch, end to end, followed by padding.

Without shared prefixes, the stream is the packed sequences. With shared prefixes, it is the branches of a
:class:`~areal.api.microbatch.PrefixTree`: a branch holds those tokens of a sequence that no earlier sequence begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.api.microbatch import PrefixTree
from areal.engine.attention.kernels import Segments


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Runs of tokens, end to end. A token attends to its own run, causally, and to the context before that run.

    A run is a sequence, a branch of a prefix tree, or the padding at the end.

    Attributes:
        lengths: tokens of each run. They sum to the length of the stream.
        context_lengths: tokens from the beginning of the sequence to the end of each run.
        context_index: int64 ``[context_length]`` for each of the first runs, on the host. Stream indices of all tokens that
            the last token of the run attends to, itself included. Runs without an entry attend to themselves only.
    """

    lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    context_index: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, seqlens: Sequence[int], padded_length: int, tree: PrefixTree | None = None) -> TokenStream:
        """Return the stream of packed sequences, or of a prefix tree, padded to a length.

        Raises:
            ValueError: the sequences are longer than ``padded_length``.
        """
        lengths, contexts = (tuple(seqlens), tuple(seqlens)) if tree is None else (tree.lengths, tree.context_lengths)
        padding = padded_length - sum(lengths)
        if padding < 0:
            raise ValueError(f"padded_length = {padded_length} is less than the {sum(lengths)} tokens of the sequences")
        # Padding is one more run, so that no real token sees it and attention needs no mask for it.
        tail = (padding,) if padding else ()
        return cls((*lengths, *tail), (*contexts, *tail), () if tree is None else tree.context_index.split(contexts))

    def __len__(self) -> int:
        return sum(self.lengths)

    def positions(self) -> Tensor:
        """Return the position of each token in its sequence, int64 ``[S]``, on the host."""
        lengths = torch.tensor(self.lengths)
        # A run ends at stream index ``cumsum`` and at sequence position ``context_length``: the difference of both shifts all its tokens.
        shift = torch.tensor(self.context_lengths) - lengths.cumsum(0)
        return torch.arange(len(self)) + shift.repeat_interleave(lengths)

    def contexts(self) -> Iterator[Tensor]:
        """Yield for each run the stream indices of all tokens that its last token attends to, int64, on the host."""
        yield from self.context_index
        # The remaining runs (all of them without a tree, else the padding) see themselves only.
        start = sum(self.lengths[: len(self.context_index)])
        for length in self.lengths[len(self.context_index) :]:
            yield torch.arange(start, start + length)
            start += length

    def segments(self, device: torch.device | str) -> Segments:
        """Return the attention segments of the full stream, one for each run."""
        if not self.context_index:
            return Segments.of(self.lengths, device=device)
        return Segments.of(self.lengths, self.context_lengths, device, keys=torch.cat(list(self.contexts())))
