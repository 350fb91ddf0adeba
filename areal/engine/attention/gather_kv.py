"""Context parallelism by gathering keys and values: any number of heads, each rank holding two slices of the stream.

The stream is cut into ``2 * size`` chunks, of which rank ``r`` holds chunks ``r`` and ``2 * size - 1 - r``: a token
sees the keys before it, so an early and a late chunk together cost every rank about the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.attention.kernels import Segments, packed_attention
from areal.engine.attention.token_stream import TokenStream
from areal.utils.collectives import GatherRows


def zigzag_shard(x: Tensor, rank: int, size: int) -> Tensor:
    """This rank's two chunks of ``[T, ...]``, as ``[T / size, ...]``."""
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def zigzag_restore(x: Tensor, size: int) -> Tensor:
    """Bring ``[T, ...]``, the ranks' slices end to end, back to the order of the stream."""
    chunks = x.unflatten(0, (size, 2, -1))
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


def zigzag_places(where: Tensor, length: int, size: int) -> Tensor:
    """Where positions ``where`` of a stream of ``length`` stand in the ranks' slices end to end."""
    chunk = length // (2 * size)
    place, offset = where // chunk, where % chunk
    late = place >= size
    owner = torch.where(late, 2 * size - 1 - place, place)
    return (2 * owner + late) * chunk + offset


def plan_keys(stream: TokenStream, rank: int, size: int, window: int | None, device: torch.device | str) -> Segments:
    """One segment for each branch in each of a rank's two chunks: its queries there, and which of the gathered keys they may see.

    Args:
        stream: whose length is a multiple of ``2 * size``.
    """
    length = len(stream)
    chunk, reach = length // (2 * size), length if window is None else window - 1
    q_lens: list[int] = []
    keys: list[Tensor] = []
    for begin in (rank * chunk, (2 * size - 1 - rank) * chunk):
        start = 0
        for own, path in zip(stream.own, stream.all_paths(), strict=True):
            first, last = max(start, begin), min(start + own, begin + chunk)
            if first < last:
                q_lens.append(last - first)
                before = len(path) - own - start  # from a place in the stream to one in the path
                keys.append(path[max(0, first + before - reach) : last + before])
            start += own
    return Segments.of(q_lens, [len(key) for key in keys], device, keys=zigzag_places(torch.cat(keys), length, size))


def gather_kv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    group: dist.ProcessGroup,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of this rank's tokens; collective over ``group``.

    Args:
        q, k, v: ``[T / size, Hq | Hkv, D | Dv]``, this rank's zig-zag slice of the packed stream.
        segments: of :func:`plan_keys` for this stream and window.
        scale, window, sinks, softcap: as for :func:`~areal.engine.attention.kernels.packed_attention`.

    Returns:
        ``[T / size, Hq, Dv]``.
    """
    widths = [k.shape[2], v.shape[2]]
    gathered = GatherRows.apply(torch.cat([k, v], dim=-1), group)
    k, v = gathered.split(widths, dim=-1)
    return packed_attention(q, k, v, segments, scale=scale, window=window, sinks=sinks, softcap=softcap)
