"""Ulysses context parallelism: ranks exchange tokens for heads, and each computes some heads over the full stream.

After Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509): one all-to-all before attention and one after.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention
from areal.utils.collectives import ExchangeRows


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, group: dist.ProcessGroup, options: AttentionOptions
) -> Tensor:
    """Compute attention of this rank's tokens. Collective over ``group``.

    Args:
        q, k, v: ``[T / size, Hq | Hkv, D | Dv]``. This rank's contiguous slice of the stream. ``Hq`` is a multiple of the
            group's size. Key heads are repeated as often as needed to divide by the size.
        segments: of the full stream ``T``.

    Returns:
        ``[T / size, Hq, Dv]``.

    Raises:
        ValueError: the query heads do not divide by the group's size.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens, n_heads = q.shape[:2]
    if n_heads % size:
        raise ValueError(
            f"{n_heads} query heads do not divide over {size} context-parallel ranks; use mode 'gather_kv'"
        )
    # Hkv * repeats is the least common multiple of Hkv and size. It divides Hq, as Hkv and size do, so that query head h
    # still finds its own key head on the rank that holds h.
    repeats = size // math.gcd(size, k.shape[1])
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)

    # Row j of each block holds the heads of rank j: [size, T / size, features of one rank's heads].
    dims = [q.shape[2], k.shape[2], v.shape[2]]
    blocks = [x.reshape(tokens, size, -1).transpose(0, 1) for x in (q, k, v)]
    one_each = [1] * size  # rows to send to, and receive from, each rank

    # Tokens for heads: afterwards this rank has its own heads of all tokens. One collective for q, k and v.
    stream = ExchangeRows.apply(torch.cat(blocks, dim=-1), one_each, one_each, group).flatten(0, 1)
    columns = stream.split([block.shape[2] for block in blocks], dim=-1)
    q, k, v = (x.unflatten(1, (-1, dim)) for x, dim in zip(columns, dims, strict=True))
    if options.sinks is not None:
        options = dataclasses.replace(options, sinks=options.sinks.view(size, -1)[rank])
    out = packed_attention(q, k, v, segments, options)

    # Heads for tokens: row j of the result holds the heads of rank j for this rank's tokens.
    by_owner = ExchangeRows.apply(out.unflatten(0, (size, tokens)), one_each, one_each, group)
    return by_owner.transpose(0, 1).flatten(1, 2)
