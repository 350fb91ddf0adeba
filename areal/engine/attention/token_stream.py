"""The token stream: all tokens that a model sees of one micro-batch, end to end, followed by padding.

Without shared prefixes, the stream is the packed sequences. With shared prefixes, it is the branches of a
:class:`~areal.api.microbatch.PrefixTree`: a branch holds those tokens of a sequence that no earlier sequence begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.api.microbatch import PrefixTree
from areal.engine.attention.kernels import Bidirectional, Segments


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Runs of tokens, end to end. A token attends to its own run, causally, and to the context before that run.

    A run is a sequence, a branch of a prefix tree, or the padding at the end.

    Attributes:
        lengths: tokens of each run. They sum to the length of the stream.
        context_lengths: tokens from the beginning of the sequence to the end of each run.
        context_index: int64 ``[context_length]`` for each of the first runs, on the host. Stream indices of all tokens that
            the last token of the run attends to, itself included. Runs without an entry attend to themselves only.
        images: start and end of the stream indices of each image whose tokens see each other in both directions. No image is in two runs.
    """

    lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    context_index: tuple[Tensor, ...] = ()
    images: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        seqlens: Sequence[int],
        padded_length: int,
        tree: PrefixTree | None = None,
        bidirectional: Tensor | None = None,
    ) -> TokenStream:
        """Return the stream of packed sequences, or of a prefix tree, padded to a length.

        Args:
            seqlens, padded_length, tree: as in :class:`~areal.api.microbatch.MicroBatch`.
            bidirectional: as in :class:`~areal.api.microbatch.ImageInputs`.

        Raises:
            ValueError: the sequences are longer than ``padded_length``.
        """
        lengths, contexts = (tuple(seqlens), tuple(seqlens)) if tree is None else (tree.lengths, tree.context_lengths)
        padding = padded_length - sum(lengths)
        if padding < 0:
            raise ValueError(f"padded_length = {padded_length} is less than the {sum(lengths)} tokens of the sequences")
        # Padding is one more run, so that no real token sees it and attention needs no mask for it.
        tail = (padding,) if padding else ()
        index = () if tree is None else tree.context_index.split(contexts)
        marked = bidirectional if tree is None or bidirectional is None else bidirectional[tree.tokens]
        images = () if marked is None else _images(lengths, marked)
        return cls((*lengths, *tail), (*contexts, *tail), index, images)

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
        images = self.bidirectional([(0, len(self))], None, device)
        if not self.context_index:
            return Segments.of(self.lengths, device=device, bidirectional=images)
        keys = torch.cat(list(self.contexts()))
        return Segments.of(self.lengths, self.context_lengths, device, keys=keys, bidirectional=images)

    def bidirectional(
        self,
        slices: Sequence[tuple[int, int]],
        window: int | None,
        device: torch.device | str,
        key_rows: Callable[[Tensor], Tensor] = lambda index: index,
    ) -> Bidirectional | None:
        """Return the tokens of images in slices of the stream, with the keys that they see. ``None`` without images.

        Args:
            slices: start and end of each slice. The given queries are those of the slices, end to end.
            window: sliding window of the layer, or ``None``. Keys that are out of reach of all queries are left out.
            device: device of the result.
            key_rows: returns the rows of the given keys for stream indices, int64.
        """
        reach = len(self) if window is None else window - 1
        q_lens: list[int] = []
        queries, keys, rows, taken = ([torch.arange(0)] for _ in range(4))
        offset = 0
        for begin, end in slices if self.images else ():
            for start, stop, context in self._image_contexts():
                first, last = max(start, begin), min(stop, end)
                if first < last:
                    own = torch.arange(first, last) - begin + offset
                    # Queries and keys are aligned at their ends: others take the place of queries that are not in the slice.
                    queries += [own, own[-1:].expand(stop - last)]
                    keys.append(context[max(0, len(context) - (stop - first) - reach) :])
                    rows.append(own)
                    taken.append(torch.arange(last - first) + sum(q_lens))
                    q_lens.append(stop - first)
            offset += end - begin
        if not q_lens:
            return None
        k_lens = [len(each) for each in keys[1:]]
        segments = Segments.of(q_lens, k_lens, device, keys=key_rows(torch.cat(keys)), causal=False)
        return Bidirectional(segments, *(torch.cat(each).to(device) for each in (queries, rows, taken)))

    def _image_contexts(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield start and end of each image, and the stream indices of all tokens that its tokens attend to, int64, on the host."""
        images, start = list(reversed(self.images)), 0
        for length, context in zip(self.lengths, self.contexts(), strict=True):
            while images and images[-1][0] < start + length:
                first, stop = images.pop()
                yield first, stop, context[: len(context) - length + stop - start]
            start += length


def _images(lengths: Sequence[int], marked: Tensor) -> tuple[tuple[int, int], ...]:
    """Return start and end of each image in a stream.

    Args:
        lengths: tokens of each run of the stream.
        marked: bool ``[S]``. Tokens of images; two images of one run are not next to each other.
    """
    # Images at the border of two runs are two.
    run = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    numbers, counts = torch.unique_consecutive(torch.where(marked, run, -1), return_counts=True)
    ends = counts.cumsum(0)
    spans = zip(numbers.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    return tuple((start, end) for number, start, end in spans if number >= 0)
