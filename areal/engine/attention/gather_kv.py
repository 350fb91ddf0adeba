"""Context parallelism by all-gather of keys and values, for any number of heads.

The stream is cut into ``2 * size`` chunks. Rank ``r`` holds chunks ``r`` and ``2 * size - 1 - r`` (zig-zag): under a causal
mask late tokens cost more than early ones, so that an early and a late chunk together cost every rank about the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention
from areal.engine.attention.token_stream import TokenStream
from areal.utils.collectives import GatherRows


def zigzag_shard(x: Tensor, rank: int, size: int) -> Tensor:
    """Return this rank's two chunks of ``[T, ...]``, as ``[T / size, ...]``."""
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def zigzag_restore(x: Tensor, size: int) -> Tensor:
    """Reorder ``[T, ...]`` from rank order (the ranks' slices end to end) to stream order."""
    chunks = x.unflatten(0, (size, 2, -1))
    # Early chunks are in rank order; late chunks are in reverse rank order.
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


def zigzag_index(positions: Tensor, length: int, size: int) -> Tensor:
    """Map positions in a stream of ``length`` tokens to indices into the ranks' slices end to end."""
    chunk_size = length // (2 * size)
    chunk, offset = positions // chunk_size, positions % chunk_size
    # The second half of the chunks is dealt out in reverse rank order, as the second chunk of each rank.
    late = chunk >= size
    owner = torch.where(late, 2 * size - 1 - chunk, chunk)
    return (2 * owner + late) * chunk_size + offset


def plan_keys(stream: TokenStream, rank: int, size: int, window: int | None, device: torch.device | str) -> Segments:
    """Return the attention segments of one rank: its queries, and the gathered keys that they attend to.

    There is one segment for each run of the stream in each of the rank's two chunks.

    Args:
        stream: of a length that is a multiple of ``2 * size``.
        window: sliding window of the layer, or ``None``. Keys that are out of reach of all queries are left out.
    """
    length = len(stream)
    chunk, reach = length // (2 * size), length if window is None else window - 1
    q_lens: list[int] = []
    keys: list[Tensor] = []
    begins = (rank * chunk, (2 * size - 1 - rank) * chunk)
    for begin in begins:
        start = 0
        for run_length, context in zip(stream.lengths, stream.contexts(), strict=True):
            # Intersect the run with the chunk: the queries of this segment.
            first, last = max(start, begin), min(start + run_length, begin + chunk)
            if first < last:
                q_lens.append(last - first)
                # Keys: the context from the first key in the window of the first query to the last query itself.
                to_context = (
                    len(context) - run_length - start
                )  # added to a stream index, gives an index into the context
                keys.append(context[max(0, first + to_context - reach) : last + to_context])
            start += run_length

    # Gathered keys are in rank order, while contexts are in stream order.
    def key_rows(index: Tensor) -> Tensor:
        return zigzag_index(index, length, size)

    images = stream.bidirectional([(begin, begin + chunk) for begin in begins], window, device, key_rows)
    k_lens = [len(key) for key in keys]
    return Segments.of(q_lens, k_lens, device, keys=key_rows(torch.cat(keys)), bidirectional=images)


def gather_kv_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, group: dist.ProcessGroup, options: AttentionOptions
) -> Tensor:
    """Compute attention of this rank's tokens over the keys of all ranks. Collective over ``group``.

    Args:
        q, k, v: ``[T / size, Hq | Hkv, D | Dv]``. This rank's zig-zag slice of the stream.
        segments: result of :func:`plan_keys` for this stream and ``options.window``.

    Returns:
        ``[T / size, Hq, Dv]``.
    """
    widths = [k.shape[2], v.shape[2]]
    # One collective for keys and values. Its backward sums their gradients over the ranks that read them.
    gathered = GatherRows.apply(torch.cat([k, v], dim=-1), group)
    k, v = gathered.split(widths, dim=-1)
    return packed_attention(q, k, v, segments, options)
