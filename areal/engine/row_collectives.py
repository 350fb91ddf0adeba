"""All-gather and reduce-scatter of rows, each the other's gradient."""

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
