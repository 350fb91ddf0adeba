"""Context parallelism by gathering keys and values: any number of heads, each rank holding two slices of the stream.

The stream is cut into ``2 * size`` chunks, of which rank ``r`` holds chunks ``r`` and ``2 * size - 1 - r``: a token
sees the keys before it, so an early and a late chunk together cost every rank about the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.attention_kernels import Segments, packed_attention
from areal.engine.row_collectives import GatherRows


def zigzag_shard(x: Tensor, rank: int, size: int) -> Tensor:
    """This rank's two chunks of ``[T, ...]``, as ``[T / size, ...]``."""
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def zigzag_restore(x: Tensor, size: int) -> Tensor:
    """Bring ``[T, ...]``, the ranks' slices end to end, back to the order of the stream."""
    chunks = x.unflatten(0, (size, 2, -1))
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class GatheredKeys:
    """Which gathered keys this rank's queries read.

    Attributes:
        segments: one for each sequence in each of the rank's two chunks: its queries there, and the keys they may see.
        index: int64 ``[keys]``, rows of the gathered keys, ranks end to end.
    """

    segments: Segments
    index: Tensor

    @classmethod
    def plan(
        cls, seqlens: Sequence[int], rank: int, size: int, window: int | None, device: torch.device | str
    ) -> GatheredKeys:
        """Keys for a stream of sequences of these lengths, which sum to a multiple of ``2 * size``."""
        chunk = sum(seqlens) // (2 * size)
        reach = sum(seqlens) if window is None else window - 1
        q_lens: list[int] = []
        keys: list[Tensor] = []
        for begin in (rank * chunk, (2 * size - 1 - rank) * chunk):
            start = 0
            for length in seqlens:
                first, last = max(start, begin), min(start + length, begin + chunk)
                if first < last:
                    q_lens.append(last - first)
                    keys.append(torch.arange(max(start, first - reach), last))
                start += length
        where = torch.cat(keys)
        place, offset = where // chunk, where % chunk
        late = place >= size
        owner = torch.where(late, 2 * size - 1 - place, place)
        index = (2 * owner + late) * chunk + offset
        return cls(Segments.of(q_lens, [len(key) for key in keys], device), index.to(device))


def gather_kv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: GatheredKeys,
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
        keys: planned for this stream and window.
        scale, window, sinks, softcap: as for :func:`~areal.engine.attention_kernels.packed_attention`.

    Returns:
        ``[T / size, Hq, Dv]``.
    """
    widths = [k.shape[2], v.shape[2]]
    gathered = GatherRows.apply(torch.cat([k, v], dim=-1), group)
    k, v = gathered.index_select(0, keys.index).split(widths, dim=-1)
    return packed_attention(q, k, v, keys.segments, scale=scale, window=window, sinks=sinks, softcap=softcap)
