"""Collectives on rows of tensors: all-gather, reduce-scatter and all-to-all, plain and differentiable.

The gradient of an all-gather is a reduce-scatter, and the other way round. The gradient of an all-to-all is the all-to-all in
the other direction.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from areal.utils import releases


def all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather ``[t, ...]`` of every rank end to end, ``[size * t, ...]``. Not differentiable."""
    x = x.contiguous()
    out = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    releases.all_gather_single(out, x, group=group)
    return out


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``[size * t, ...]`` over ranks, and return this rank's rows ``[t, ...]``. Not differentiable."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    releases.reduce_scatter_single(out, x, op=dist.ReduceOp.SUM, group=group)
    return out


class GatherRows(torch.autograd.Function):
    """All-gather whose backward sums gradients over ranks, for gathered rows that each rank uses in a different way.

    If all ranks compute the same from the gathered rows, their gradients are equal and must not be summed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_scatter_rows(grads[0], ctx.group), None


class ReduceScatterRows(torch.autograd.Function):
    """Reduce-scatter of summands, one on each rank. The backward gathers the gradients of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_gather_rows(grads[0], ctx.group), None


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to all ranks, and return the received rows end to end (all-to-all). Not differentiable.

    Args:
        x: rows to send, those for rank 0 first.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: ranks that exchange rows.
    """
    return _exchange_rows(x, sent, received, group.group_name)


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row ``i`` of ``[size, ...]`` to rank ``i``, and return what the ranks sent, by rank.

    Unlike :func:`exchange_rows`, activation checkpointing neither keeps nor replays it: whoever keeps the result does not call it again.
    """
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts.contiguous(), group=group)
    return arriving


@torch.library.custom_op("areal::exchange_rows", mutates_args=())
def _exchange_rows(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Do what :func:`exchange_rows` does, as one operation, whose result activation checkpointing can keep."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_resolve_process_group(group))  # type: ignore[arg-type]  # a NewType of str
    return out


@_exchange_rows.register_fake
def _(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    return x.new_empty((sum(received), *x.shape[1:]))


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows. The backward sends the gradient of each row to the rank that the row came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = (sent, received), group
        return exchange_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sent, received = ctx.counts
        return exchange_rows(grads[0], received, sent, ctx.group), None, None, None
