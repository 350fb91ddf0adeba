"""Ulysses: ranks trade tokens for heads, so that each attends with some of the heads over the whole packed stream.

After Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509): one all-to-all before attention and one after.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.attention.kernels import Segments, packed_attention


class _AllToAll(torch.autograd.Function):
    """``[size, ...]`` to ``[size, ...]``: row ``j`` goes to rank ``j``, and row ``j`` of the result came from it.

    Its transpose is itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchange(grads[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def ulysses_attention(
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
        q, k, v: ``[T / size, Hq | Hkv, D | Dv]``, this rank's contiguous slice of the packed stream. ``Hq`` is a
            multiple of the group's size; key heads that do not divide by it are repeated as few times as make them.
        segments: of the whole stream ``T``.
        scale, window, sinks, softcap: as for :func:`~areal.engine.attention.kernels.packed_attention`.

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
    # Hkv * repeats is the least common multiple of Hkv and size. It divides Hq, as both do, so that query head h still
    # finds its own key head on the rank that holds h.
    repeats = size // math.gcd(size, k.shape[1])
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    dims = [q.shape[2], k.shape[2], v.shape[2]]
    parts = [x.reshape(tokens, size, -1).transpose(0, 1) for x in (q, k, v)]
    stream = _AllToAll.apply(torch.cat(parts, dim=-1), group).flatten(0, 1)  # [T, features of this rank's heads]
    columns = stream.split([part.shape[2] for part in parts], dim=-1)
    q, k, v = (x.unflatten(1, (-1, dim)) for x, dim in zip(columns, dims, strict=True))
    if sinks is not None:
        sinks = sinks.view(size, -1)[rank]
    out = packed_attention(q, k, v, segments, scale=scale, window=window, sinks=sinks, softcap=softcap)
    back = _AllToAll.apply(out.unflatten(0, (size, tokens)), group)  # [heads' owner, this rank's tokens, heads, Dv]
    return back.transpose(0, 1).flatten(1, 2)
