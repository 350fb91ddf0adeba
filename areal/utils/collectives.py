"""All-gather and reduce-scatter of rows, each the other's gradient, and all-to-all, its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[t, ...]`` of each rank end to end, ``[size * t, ...]``. Not differentiable."""
    x = x.contiguous()
    out = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    _all_gather(out, x, group=group)
    return out


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows ``[t, ...]`` of the sum over ranks of ``[size * t, ...]``. Not differentiable."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    _reduce_scatter(out, x, op=dist.ReduceOp.SUM, group=group)
    return out


class GatherRows(torch.autograd.Function):
    """All-gather whose gradient is summed over ranks: each of them used the gathered rows for something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_scatter_rows(grads[0], ctx.group), None


class ReduceScatterRows(torch.autograd.Function):
    """Reduce-scatter of what each rank computed a summand of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_gather_rows(grads[0], ctx.group), None


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows that the ranks send to this one, end to end. Not differentiable.

    Args:
        x: what this rank sends, end to end. sent, received: how many rows, by rank.
    """
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows, whose gradients go back the way they came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way, ctx.group = (sent, received), group
        return exchange_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sent, received = ctx.way
        return exchange_rows(grads[0], received, sent, ctx.group), None, None, None
