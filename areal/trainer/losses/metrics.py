"""Metrics over trained tokens and over sequences, with the weights that make them exact over any cut of a batch."""

from __future__ import annotations

from torch import Tensor

from areal.api import Metric
from areal.trainer.losses.numerics import trained_positions


def mean_where(x: Tensor, keep: Tensor) -> Metric:
    """The mean of ``x`` where ``keep`` is true, weighing how many there are.

    Args:
        x: numbers or booleans; what stands where ``keep`` is false is left out, even a NaN.
        keep: bool, of the shape of ``x``.
    """
    count = keep.sum()
    # In float64, so that value times weight is the sum again to the last digit that is reported.
    total = x.detach().double().masked_fill(~keep, 0.0).sum()
    return Metric(total / count.clamp(min=1), weight=count)


def token_mean(x: Tensor, mask: Tensor) -> Metric:
    """The mean of ``x`` ``[T]`` over positions where ``mask`` ``[T]`` is not 0."""
    return mean_where(x, trained_positions(mask))


def token_max(x: Tensor, mask: Tensor, *, least: float) -> Metric:
    """The largest ``x`` ``[T]`` where ``mask`` ``[T]`` is not 0; ``least`` where there is no such position."""
    return Metric(x.detach().masked_fill(mask == 0, least).max(), reduce="max")


def token_count(mask: Tensor) -> Metric:
    """How many positions of ``mask`` ``[T]`` are not 0."""
    return Metric(trained_positions(mask).sum(), reduce="sum")
