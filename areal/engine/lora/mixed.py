"""Contributions of several adapters to one layer: each run of rows has the factors of its adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal.engine.lora.low_rank import LowRank
from areal.engine.stream.layout import AdapterRuns

Spans = Sequence[tuple[int, int]]
"""First row and end of each run."""


class MixedLowRank:
    """The factors of one layer for a micro-batch with several adapters. Applied like :class:`LowRank`.

    Args:
        pairs: factors of the layer by adapter. An adapter without factors of this layer is missing.
        runs: runs of rows with one adapter.
    """

    def __init__(self, pairs: Mapping[str, LowRank], runs: AdapterRuns) -> None:
        self._pairs, self._runs = pairs, runs
        # All adapters are split over ranks as the layer is.
        any_pair = next(iter(pairs.values()))
        self._split, self._tp_rank = any_pair.split, any_pair.tp_rank
        self._width = max(pair.target.rank for pair in pairs.values())

    # Runs differ between micro-batches: a graph would contain their lengths.
    @torch.compiler.disable
    def apply(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output plus the contribution of each run's adapter. Arguments as for :meth:`LowRank.apply`."""
        # Down to the ranks, in a matrix as wide as the largest.
        x = self._split.before_down(x.flatten(0, -2))
        spans, pairs = self._spans(len(x))
        low = _Down.apply(x, self._width, spans, *(pair.down.parameter.to(x.dtype) for pair in pairs))
        # Communication of the layer: the tokens may be others afterwards.
        low, rows = self._split.before_up(low), out.flatten(0, -2)
        spans, pairs = self._spans(len(rows))
        scales = [pair.scale for pair in pairs]
        added = _Up.apply(rows, low, spans, scales, *(pair.local_up().to(x.dtype) for pair in pairs))
        return added.view(out.shape)

    def _spans(self, n_rows: int) -> tuple[Spans, list[LowRank]]:
        """Return the runs with factors of this layer, and their factors."""
        found = [(rows, self._pairs.get(name)) for name, rows in self._runs.slices(n_rows, self._tp_rank)]
        present = [(rows, pair) for rows, pair in found if pair is not None]
        return [(rows.start, rows.stop) for rows, _ in present], [pair for _, pair in present]


def mixed_pairs(adapters: Mapping[str, Mapping[str, LowRank]], runs: AdapterRuns) -> dict[str, MixedLowRank]:
    """Return the factors of each layer that one of several adapters has.

    Args:
        adapters: factors by layer, of each adapter.
        runs: runs of rows with one adapter.
    """
    layers: dict[str, dict[str, LowRank]] = {}
    for name, pairs in adapters.items():
        for layer, pair in pairs.items():
            layers.setdefault(layer, {})[name] = pair
    return {layer: MixedLowRank(pairs, runs) for layer, pairs in layers.items()}


# The products of both functions, and of their backwards, are those of torch for a single adapter, so that they round alike. On a CPU that
# depends on the memory of a narrow result, too: it is computed in new memory.


class _Down(torch.autograd.Function):
    """``x @ A.T`` for each run of rows, ``[T, width]``: zeros in other rows, and after the rank of an adapter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, spans: Spans, *downs: Tensor) -> Tensor:
        ctx.save_for_backward(x, *downs)
        ctx.spans = spans
        return _end_to_end(
            (len(x), width), x, spans, [_rows(x, span).mm(down.t()) for span, down in zip(spans, downs, strict=True)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *downs = ctx.saved_tensors
        parts = [_rows(grads[0], span, len(down)) for span, down in zip(ctx.spans, downs, strict=True)]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _end_to_end(x.shape, x, ctx.spans, [p.mm(down) for p, down in zip(parts, downs, strict=True)])
        grad_downs = [part.t().mm(_rows(x, span)) for part, span in zip(parts, ctx.spans, strict=True)]
        return grad_x, None, None, *grad_downs


class _Up(torch.autograd.Function):
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
