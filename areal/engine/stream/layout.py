"""Index tensors of a micro-batch for the model of one rank: positions, attention segments, and rows with outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal.api.microbatch import MicroBatch, PrefixTree
from areal.engine.attention.context_parallel import AttentionLayout, ContextParallel
from areal.engine.attention.kernels import Segments
from areal.engine.attention.token_stream import TokenStream
from areal.engine.stream.adapter_runs import AdapterRuns
from areal.engine.stream.outputs import OutputRows
from areal.utils.host_copy import HostCopy, TensorMap


@dataclass(frozen=True, eq=False)
class SharedPrefixIndex:
    """Index tensors of a micro-batch with shared prefixes.

    Attributes:
        tokens: int64 ``[S]``. Packed token of each token of the stream.
        stream_index: int64 ``[T]``. Stream index of each packed token.
        outputs: the rows with outputs of this rank.
    """

    tokens: Tensor
    stream_index: Tensor
    outputs: OutputRows


@dataclass(frozen=True, eq=False)
class StreamLayout:
    """Everything about a micro-batch that one rank's model reads from index tensors.

    Made on the host with the micro-batch, and copied to the device with the batch. Without references to process groups, which
    close with the last reference to them.

    Attributes:
        split: mode, size and rank of context parallelism.
        stream: the full stream of tokens.
        positions: int64 ``[S / size]``. Positions of this rank's tokens in their sequences.
        segments: attention segments of the full stream; ``None`` for one sequence per row.
        keys: window -> attention segments of this rank's queries, for context parallelism that gathers keys.
        rows: index of each packed token in a grid of one sequence per row (int64 ``[T]``), and the number of rows and columns.
        wanted: int64. Indices of this rank's tokens (rows) with outputs; ``None`` for all.
        shared: index tensors of shared prefixes; ``None`` without them.
        adapters: runs of this rank's tokens with one adapter; ``None`` for the selected adapter.
    """

    split: tuple[str, int, int]
    stream: TokenStream
    positions: Tensor
    segments: Segments | None
    keys: Mapping[int | None, Segments]
    rows: tuple[Tensor, int, int] | None
    wanted: Tensor | None
    shared: SharedPrefixIndex | None
    adapters: AdapterRuns | None = None

    @classmethod
    def of(
        cls,
        seqlens: Sequence[int],
        padded_length: int,
        tree: PrefixTree | None,
        wanted: Tensor | None,
        adapters: Sequence[str] | None = None,
        *,
        cp: ContextParallel,
        rows: bool,
    ) -> StreamLayout:
        """Return the layout of packed sequences on the host.

        Args:
            seqlens, padded_length, tree, wanted, adapters: as in :class:`~areal.api.microbatch.MicroBatch`.
            cp: the ranks that the stream is split over.
            rows: run one sequence per row instead of packed.
        """
        stream = TokenStream.of(seqlens, padded_length, tree)
        attention = None if rows else cp.layout(stream)
        # With shared prefixes, several packed tokens may be one token of the stream, with different targets.
        shared = None
        if tree is not None:
            shared = SharedPrefixIndex(tree.tokens, tree.stream_index, OutputRows.of(tree, padded_length, cp))
        # Counted on the host: on a GPU, nonzero() would wait for the device.
        if wanted is not None:
            local = (
                cp.shard(pad_rows(wanted, padded_length, False))
                if shared is None
                else wanted[shared.outputs.packed_index]
            )
            wanted = local.nonzero().squeeze(1)
        grid = _row_grid(seqlens) if rows else None
        runs = None
        if adapters is not None:
            names = list(dict.fromkeys(adapters))
            of_sequences = torch.tensor([names.index(name) for name in adapters])
            of_tokens = of_sequences.repeat_interleave(torch.tensor(seqlens))
            of_stream = cp.shard(_pad_by_last(of_tokens if tree is None else of_tokens[tree.tokens], padded_length))
            of_outputs = of_stream if shared is None else of_tokens[shared.outputs.packed_index]
            of_layers = of_stream if grid is None else of_sequences.repeat_interleave(grid[2])
            runs = AdapterRuns.of(names, of_layers, of_outputs, wanted)
        return cls(
            split=(cp.mode, cp.size, cp.rank),
            stream=stream,
            positions=cp.shard(stream.positions()),
            segments=None if attention is None else attention.segments,
            keys={} if attention is None else attention.keys,
            rows=grid,
            wanted=wanted,
            shared=shared,
            adapters=runs,
        )

    def map(self, fn: TensorMap) -> StreamLayout:
        """Apply ``fn`` to every index tensor."""
        shared = self.shared
        if shared is not None:
            shared = SharedPrefixIndex(fn(shared.tokens), fn(shared.stream_index), shared.outputs.map(fn))
        return replace(
            self,
            positions=fn(self.positions),
            segments=None if self.segments is None else self.segments.map(fn),
            keys={window: segments.map(fn) for window, segments in self.keys.items()},
            rows=None if self.rows is None else (fn(self.rows[0]), *self.rows[1:]),
            wanted=None if self.wanted is None else fn(self.wanted),
            shared=shared,
        )

    def attention(self, cp: ContextParallel) -> AttentionLayout | None:
        """Return the layout of attention for one forward; ``None`` for one sequence per row."""
        if self.segments is None:
            return None
        # New segments: the masks that layers keep in them are freed with the forward.
        keys = {window: replace(segments) for window, segments in self.keys.items()}
        return AttentionLayout(cp, self.stream, replace(self.segments), keys)


def layout_of(mb: MicroBatch, cp: ContextParallel, *, rows: bool) -> StreamLayout:
    """Return the layout that was made with the micro-batch, or a new one if that is missing or for another engine."""
    made = mb.layout
    if isinstance(made, StreamLayout) and made.split == (cp.mode, cp.size, cp.rank) and (made.rows is not None) == rows:
        return made
    made = StreamLayout.of(mb.seqlens, mb.padded_length, mb.tree, mb.wanted, mb.adapters, cp=cp, rows=rows)
    copy = HostCopy(mb.cu_seqlens.device)
    made.map(copy.add)
    copy.run()
    return made.map(copy.get)


def pad_rows(x: Tensor, length: int, value: float) -> Tensor:
    """Append rows with ``value`` to ``[T, ...]``, up to ``length`` rows."""
    if len(x) == length:
        return x
    return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), value)])


def _pad_by_last(x: Tensor, length: int) -> Tensor:
    """Repeat the last row of ``[T]``, up to ``length`` rows: padding belongs to the last run."""
    return torch.cat([x, x[-1:].expand(length - len(x))])


def _row_grid(seqlens: Sequence[int]) -> tuple[Tensor, int, int]:
    """Return the index of each packed token in a grid of one sequence per row, and the grid's rows and columns."""
    width = max(seqlens)
    grid_index = torch.cat([torch.arange(length) + row * width for row, length in enumerate(seqlens)])
    return grid_index, len(seqlens), width
