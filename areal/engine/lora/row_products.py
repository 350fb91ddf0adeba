"""Products of runs of rows with the factors of their adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]
"""First row and end of each run."""

SavedInput = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Tensor that a backward keeps instead of an input ``[T, inputs]``, and the function that returns the input from it."""

# The products of both functions, and of their backwards, are those of torch for a single adapter, so that they round alike. On a CPU that
# depends on the memory of a narrow result, too: it is computed in new memory.


class Down(torch.autograd.Function):
    """``x @ A.T`` for each run of rows, ``[T, width]``: zeros in other rows, and after the rank of an adapter.

    The backward keeps ``saved`` instead of ``x``, if given.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, spans: Spans, saved: SavedInput | None, *downs: Tensor) -> Tensor:
        kept, ctx.restore = (x, None) if saved is None else saved
        ctx.save_for_backward(kept, *downs)
        ctx.spans = spans
        return _end_to_end(
            (len(x), width), x, spans, [_rows(x, span).mm(down.t()) for span, down in zip(spans, downs, strict=True)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *downs = ctx.saved_tensors
        x = x if ctx.restore is None else ctx.restore(x)
        parts = [_rows(grads[0], span, len(down)) for span, down in zip(ctx.spans, downs, strict=True)]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _end_to_end(x.shape, x, ctx.spans, [p.mm(down) for p, down in zip(parts, downs, strict=True)])
        grad_downs = [part.t().mm(_rows(x, span)) for part, span in zip(parts, ctx.spans, strict=True)]
        return grad_x, None, None, None, *grad_downs


class Up(torch.autograd.Function):
    """``out + scale * low @ B.T`` for each run of rows."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, low: Tensor, spans: Spans, scales: Sequence[float], *ups: Tensor) -> Tensor:
        added = out.clone(memory_format=torch.contiguous_format)
        for span, scale, up in zip(spans, scales, ups, strict=True):
            _rows(added, span).addmm_(_rows(low, span, up.shape[1]), up.t(), alpha=scale)
        ctx.save_for_backward(low, *ups)
        ctx.spans, ctx.scales = spans, scales
        return added

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        low, *ups = ctx.saved_tensors
        parts, grad_ups = [], []
        for span, scale, up in zip(ctx.spans, ctx.scales, ups, strict=True):
            grad = _rows(grads[0], span)
            parts.append(grad.mm(up).mul_(scale))
            grad_ups.append(grad.t().mm(_rows(low, span, up.shape[1])).mul_(scale))
        return grads[0], _end_to_end(low.shape, low, ctx.spans, parts), None, None, *grad_ups


def _rows(x: Tensor, span: tuple[int, int], columns: int | None = None) -> Tensor:
    """Return a run of rows, and its first columns."""
    rows = x.narrow(0, span[0], span[1] - span[0])
    return rows if columns in (None, x.shape[1]) else rows.narrow(1, 0, columns)  # type: ignore[arg-type]


def _end_to_end(shape: Sequence[int], like: Tensor, spans: Spans, parts: list[Tensor]) -> Tensor:
    """Return a matrix of these runs of rows, with zeros elsewhere."""
    # Usually every row is in a run, and all runs are equally wide.
    if sum(map(len, parts)) == shape[0] and all(part.shape[1] == shape[1] for part in parts):
        return torch.cat(parts)
    whole = like.new_zeros(shape)
    for span, part in zip(spans, parts, strict=True):
        _rows(whole, span, part.shape[1]).copy_(part)
    return whole
