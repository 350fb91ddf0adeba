"""Index tensors of a micro-batch for the model of one rank: positions, attention segments, rows with outputs, runs of adapters.

With shared prefixes, several packed tokens may be one token of the stream, with different targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from areal.api.batch import TokenOutputs
from areal.api.microbatch import MicroBatch, PrefixTree
from areal.engine.attention.context_parallel import AttentionLayout, ContextParallel
from areal.engine.attention.kernels import Segments, TakeRows
from areal.engine.attention.token_stream import TokenStream
from areal.engine.faults import map_outputs
from areal.engine.recurrence.chunks import ChunkSizes, RunChunks
from areal.utils.host_copy import HostCopy, TensorMap

Runs = tuple[tuple[str, int], ...]
"""Name of an adapter and number of consecutive rows, end to end."""


@dataclass(frozen=True, eq=False)
class AdapterRuns:
    """The adapter of each row that one rank's model computes, as runs. On the host.

    Attributes:
        layers: runs of the rows of linear layers, padding included.
        outputs: runs of the rows with outputs.
        wanted: runs of the rows with log-probs, entropy and top-k.
    """

    layers: Runs
    outputs: Runs
    wanted: Runs

    @classmethod
    def of(cls, names: Sequence[str], layers: Tensor, outputs: Tensor, wanted: Tensor | None) -> AdapterRuns:
        """Return the runs of rows.

        Args:
            names: names of adapters, by index.
            layers: int64. Index of the adapter of each row of linear layers, on the host.
            outputs: the same of each row with outputs.
            wanted: int64. Rows among those with outputs that are wanted; ``None`` for all.
        """
        rows = _runs(names, outputs)
        return cls(_runs(names, layers), rows, rows if wanted is None else _runs(names, outputs[wanted]))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters of linear layers, in the order of their first rows."""
        return tuple(dict.fromkeys(name for name, _ in self.layers))

    @cached_property
    def n_rows(self) -> int:
        """Number of rows of linear layers."""
        return sum(length for _, length in self.layers)

    def slices(self, n_rows: int, rank: int) -> Iterator[tuple[str, slice]]:
        """Yield the adapter and the rows of each run in a layer's input or output.

        Args:
            n_rows: number of its rows: all, or those of one of the ranks that split the tokens again.
            rank: index of this rank among them.

        Raises:
            ValueError: a layer does not compute one row per token.
        """
        if n_rows == 0 or self.n_rows % n_rows:
            raise ValueError(
                f"a layer with an adapter computes {n_rows} rows of {self.n_rows} tokens: samples of one call cannot name several adapters for "
                "this model; make one call for each adapter"
            )
        # Rows of this rank begin at ``offset``.
        offset = 0 if n_rows == self.n_rows else rank * n_rows
        start = 0
        for name, length in self.layers:
            first, last = max(start, offset) - offset, min(start + length, offset + n_rows) - offset
            if first < last:
                yield name, slice(first, last)
            start += length


def _runs(names: Sequence[str], index: Tensor) -> Runs:
    values, counts = torch.unique_consecutive(index, return_counts=True)
    return tuple((names[k], n) for k, n in zip(values.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class OutputRows:
    """The rows that one context-parallel rank computes outputs of.

    Every rank has the same number of rows, because an all-gather needs equal sizes: ranks with fewer rows repeat one.

    Attributes:
        local_index: int64 ``[R]``. Index of each row's token in this rank's slice of the stream.
        packed_index: int64 ``[R]``. Packed token whose target and temperature each row uses.
        output_index: int64 ``[T]``. For each packed token, the index of its outputs in the ranks' rows end to end.
    """

    local_index: Tensor
    packed_index: Tensor
    output_index: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> OutputRows:
        """Apply ``fn`` to every tensor."""
        return OutputRows(fn(self.local_index), fn(self.packed_index), fn(self.output_index))

    @classmethod
    def of(cls, tree: PrefixTree, padded_length: int, cp: ContextParallel) -> OutputRows:
        """Assign each output token of a tree to the rank that has its hidden state, and return the rows of this rank."""
        if cp.size == 1:
            return cls(tree.stream_index[tree.output_tokens], tree.output_tokens, tree.output_index)
        # The rank of each output token, and how many each rank has.
        slice_length = padded_length // cp.size
        gathered = cp.gathered_index(tree.stream_index[tree.output_tokens], padded_length)
        owner = gathered // slice_length
        counts = owner.bincount(minlength=cp.size)
        most = int(counts.max())

        # Number the rows rank by rank, with room for ``most`` rows on each: rank r begins at row r * most.
        by_owner = owner.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        row = torch.empty_like(gathered)
        row[by_owner] = torch.arange(len(gathered)) + (torch.arange(cp.size) * most - starts)[owner[by_owner]]

        # This rank's rows, filled up to ``most``. Nothing reads the additional rows, so that any token will do.
        local = by_owner[starts[cp.rank] : starts[cp.rank] + counts[cp.rank]]
        local = torch.cat([local, by_owner[:1].expand(most - len(local))])
        local_index = (gathered[local] - cp.rank * slice_length) % slice_length
        return cls(local_index, tree.output_tokens[local], row[tree.output_index])


def gather_outputs(
    local: TokenOutputs, cp: ContextParallel, n_tokens: int, output_index: Tensor | None = None
) -> TokenOutputs:
    """Return outputs in canonical form: of all packed tokens, ``[T, ...]``, gathered over context-parallel ranks.

    Args:
        local: outputs of this rank's tokens or rows.
        cp: the ranks that the token stream is split over.
        n_tokens: number of packed tokens ``T``.
        output_index: :attr:`OutputRows.output_index` on the device, with shared prefixes.
    """
    if output_index is None:
        return map_outputs(lambda x: cp.gather(x, n_tokens), local)
    # Tokens with equal outputs read the same row; TakeRows sums their gradients.
    return map_outputs(lambda x: TakeRows.apply(cp.gather_rows(x), output_index), local)


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
        chunks: chunks of the full stream for recurrent layers; ``None`` for a model without them.
        recurrence: what recurrent layers need of the chunks.
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
    chunks: RunChunks | None = None
    recurrence: ChunkSizes | None = None

    @classmethod
    def of(
        cls,
        seqlens: Sequence[int],
        padded_length: int,
        tree: PrefixTree | None,
        wanted: Tensor | None,
        adapters: Sequence[str] | None = None,
        bidirectional: Tensor | None = None,
        *,
        cp: ContextParallel,
        rows: bool,
    ) -> StreamLayout:
        """Return the layout of packed sequences on the host.

        Args:
            seqlens, padded_length, tree, wanted, adapters: as in :class:`~areal.api.microbatch.MicroBatch`.
            bidirectional: as in :class:`~areal.api.microbatch.ImageInputs`.
            cp: the ranks that the stream is split over.
            rows: run one sequence per row instead of packed.
        """
        stream = TokenStream.of(seqlens, padded_length, tree, bidirectional)
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
            chunks=None if attention is None else attention.chunks,
            recurrence=None if rows else cp.recurrence,
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
            chunks=None if self.chunks is None else self.chunks.map(fn),
        )

    def attention(self, cp: ContextParallel) -> AttentionLayout | None:
        """Return the layout of attention for one forward; ``None`` for one sequence per row."""
        if self.segments is None:
            return None
        # New segments: the masks that layers keep in them are freed with the forward.
        segments, *keys = (each.map(lambda x: x) for each in (self.segments, *self.keys.values()))
        return AttentionLayout(cp, self.stream, segments, dict(zip(self.keys, keys, strict=True)), self.chunks)


def layout_of(mb: MicroBatch, cp: ContextParallel, *, rows: bool) -> StreamLayout:
    """Return the layout that was made with the micro-batch, or a new one if that is missing or for another engine."""
    made, wanted = mb.layout, ((cp.mode, cp.size, cp.rank), rows, None if rows else cp.recurrence)
    if isinstance(made, StreamLayout) and (made.split, made.rows is not None, made.recurrence) == wanted:
        return made
    of_mb = (mb.seqlens, mb.padded_length, mb.tree, mb.wanted, mb.adapters)
    made = StreamLayout.of(*of_mb, None if mb.images is None else mb.images.bidirectional, cp=cp, rows=rows)
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
