"""Chunks of a token stream, in the order in which a recurrent state passes through them.

A state passes from each token to the next one of its sequence, and never over the border of a sequence. The stream is therefore cut into
chunks that begin with a run: a sequence, or a branch of shared prefixes. Chunks of equal depth are computed at once, so that the number of
steps follows the longest sequence and not the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal.engine.attention.token_stream import TokenStream

_NONE = -1
"""Predecessor of a token that begins a sequence."""


WHOLE_RUNS = 0
"""Number of tokens of a chunk that has a whole run: that of the longest run."""


@dataclass(frozen=True)
class ChunkSizes:
    """What the recurrent layers of a model need of a stream.

    Attributes:
        tokens: tokens of a chunk, or :data:`WHOLE_RUNS`: nothing passes from a run to another, not from a shared prefix either.
        context: tokens before a run that its convolutions see.
    """

    tokens: int
    context: int

    @property
    def whole_runs(self) -> bool:
        """Whether a chunk has a whole run."""
        return self.tokens == WHOLE_RUNS


@dataclass(frozen=True, eq=False)
class RunChunks:
    """Index tensors of a stream of ``T`` tokens in ``C`` chunks of ``Q`` tokens. Index ``T`` is a row of zeros.

    Attributes:
        sizes: what they were made for, with the number of tokens of their chunks.
        tokens: int64 ``[C * Q]``. Token of each place of the chunks, which are in the order of their depth.
        places: int64 ``[T]``. Place of each token.
        sources: int64, one for each depth. For each of its chunks, the chunk before it among those of the depth before. Empty for the first.
        counts: number of chunks of each depth, on the host.
        with_context: int64 ``[T + context * runs]``. Tokens of each run after the last tokens before it.
        after_context: int64 ``[T]``. Index of each token in ``with_context``.
        cu_seqlens: int64 ``[runs + 1]``. Where runs begin, and ``T``, as kernels take it. ``None`` if a run continues from another one.
        seq_idx: int32 ``[1, T]``. Number of each token's run, or ``None``.
    """

    sizes: ChunkSizes
    tokens: Tensor
    places: Tensor
    sources: tuple[Tensor, ...]
    counts: tuple[int, ...]
    with_context: Tensor
    after_context: Tensor
    cu_seqlens: Tensor | None
    seq_idx: Tensor | None

    @classmethod
    def of(cls, stream: TokenStream, sizes: ChunkSizes) -> RunChunks:
        """Return the chunks of a stream, on the host."""
        length, before = len(stream), _before(stream)
        size = max(stream.lengths) if sizes.whole_runs else sizes.tokens
        # A chunk ends at the end of a run, also where a branch continues from a token in the middle of one.
        starts = _piece_starts(before)
        by_depth: list[list[tuple[int, int, int]]] = []  # first token, end, number of the chunk before
        ends = {_NONE: (-1, 0)}  # depth, and number at that depth, of the chunk that ends with a token
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            depth, number = ends[int(before[start])]
            for first in range(start, end, size):
                depth += 1
                if depth == len(by_depth):
                    by_depth.append([])
                by_depth[depth].append((first, min(first + size, end), number))
                number = len(by_depth[depth]) - 1
            ends[end - 1] = depth, number
        spans = [span for each in by_depth for span in each]
        firsts, lasts = (torch.tensor([span[i] for span in spans]) for i in (0, 1))
        tokens = firsts[:, None] + torch.arange(size)
        tokens = torch.where(tokens < lasts[:, None], tokens, length).flatten()
        places = torch.empty(length + 1, dtype=torch.long)
        places[tokens] = torch.arange(len(tokens))
        sources = [[span[2] for span in each] if depth else [] for depth, each in enumerate(by_depth)]
        with_context, after_context = _contexts(before, sizes.context)
        return cls(
            sizes=replace(sizes, tokens=size),
            tokens=tokens,
            places=places[:length],
            sources=tuple(torch.tensor(each, dtype=torch.long) for each in sources),
            counts=tuple(len(each) for each in by_depth),
            with_context=with_context,
            after_context=after_context,
            **_borders(before),
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> RunChunks:
        """Apply ``fn`` to every tensor."""
        return replace(
            self,
            tokens=fn(self.tokens),
            places=fn(self.places),
            sources=tuple(fn(each) for each in self.sources),
            with_context=fn(self.with_context),
            after_context=fn(self.after_context),
            cu_seqlens=None if self.cu_seqlens is None else fn(self.cu_seqlens),
            seq_idx=None if self.seq_idx is None else fn(self.seq_idx),
        )

    def cut(self, x: Tensor) -> Tensor:
        """Return ``[T, ...]`` as chunks ``[C, Q, ...]``, with zeros where a chunk has no token."""
        return _with_zeros(x, 0).index_select(0, self.tokens).unflatten(0, (-1, self.sizes.tokens))

    def join(self, chunks: Tensor) -> Tensor:
        """Return chunks ``[C, Q, ...]`` as ``[T, ...]``."""
        return chunks.flatten(0, 1).index_select(0, self.places)

    def scan(self, step: Callable[[slice, Tensor], Tensor], start: Tensor) -> Tensor:
        """Pass states through the chunks, depth by depth.

        Args:
            step: returns the states ``[n, ...]`` after some chunks, for their slice and the states before them.
            start: ``[...]``. State before a sequence.

        Returns:
            ``[C, ...]``. State before each chunk.
        """
        states, end, after = [], 0, start
        for depth, count in enumerate(self.counts):
            before = after.index_select(0, self.sources[depth]) if depth else start.expand(count, *start.shape)
            states.append(before)
            begin, end = end, end + count
            if depth < len(self.counts) - 1:
                after = step(slice(begin, end), before)
        return torch.cat(states)


def with_context(x: Tensor, chunks: RunChunks) -> Tensor:
    """Return ``[..., T]`` with the tokens before each run in front of it, and zeros before the beginning of a sequence."""
    return _with_zeros(x, -1).index_select(-1, chunks.with_context)


def _with_zeros(x: Tensor, dim: int) -> Tensor:
    return torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)


def _before(stream: TokenStream) -> Tensor:
    """Return the token before each token in its sequence, int64 ``[T]``; :data:`_NONE` at its beginning."""
    before, start = torch.arange(-1, len(stream) - 1), 0
    for length, context in zip(stream.lengths, stream.contexts(), strict=True):
        before[start] = context[-length - 1] if len(context) > length else _NONE
        start += length
    return before


def _begins_run(before: Tensor) -> Tensor:
    """Return whether each token is the first of its run, bool ``[T]``."""
    first = before != torch.arange(len(before)) - 1
    first[:1] = True
    return first


def _piece_starts(before: Tensor) -> list[int]:
    """Return where pieces of runs begin: at the beginning of a run, and after a token that another run continues from."""
    first = _begins_run(before)
    continued = before[first]
    first[(continued[continued != _NONE] + 1).clamp(max=len(before) - 1)] = True
    starts: list[int] = first.nonzero().flatten().tolist()
    return starts


def _borders(before: Tensor) -> dict[str, Tensor | None]:
    """Return the fields ``cu_seqlens`` and ``seq_idx`` of :class:`RunChunks`."""
    first = _begins_run(before)
    starts = first.nonzero().flatten()
    if (before[starts] != _NONE).any():
        return {"cu_seqlens": None, "seq_idx": None}
    seq_idx = (first.cumsum(0) - 1).to(torch.int32)[None]
    return {"cu_seqlens": torch.cat([starts, torch.tensor([len(before)])]), "seq_idx": seq_idx}


def _contexts(before: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the fields ``with_context`` and ``after_context`` of :class:`RunChunks`."""
    length = len(before)
    # Runs alone: inside of a run, the tokens before are there already.
    starts = _begins_run(before).nonzero().flatten()
    # One more entry, so that the token before none is none again. Both have the index of the row of zeros.
    previous = torch.cat([torch.where(before == _NONE, length, before), torch.tensor([length])])
    columns: list[Tensor] = []
    token = starts
    for _ in range(context):
        token = previous[token]
        columns.insert(0, token)
    added = torch.arange(1, len(starts) + 1).repeat_interleave(torch.cat([starts[1:], torch.tensor([length])]) - starts)
    after = torch.arange(length) + added * context
    index = torch.empty(length + context * len(starts), dtype=torch.long)
    index[after] = torch.arange(length)
    if context:
        index[(after[starts][:, None] + torch.arange(-context, 0)).flatten()] = torch.stack(columns, 1).flatten()
    return index, after
