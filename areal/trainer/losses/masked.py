"""Arithmetic on trained positions: masked fill, bounded log-ratios, and means and counts as metrics.

A position is trained where the mask is not 0. Values at all other positions may be anything, including NaN. They are filled before any
arithmetic, because NaN times 0 is NaN in the loss and in its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.api import Metric

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ``[-20, 20]`` before ``exp``: ratios lie within 2e-9 and 5e8. Beyond the bound the gradient is 0."""


def to_compute_dtype(x: Tensor) -> Tensor:
    """Return ``x`` in float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def trained_positions(mask: Tensor) -> Tensor:
    """Return a bool tensor of the shape of ``mask``: True where ``mask`` is not 0."""
    return mask != 0


def at_trained(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` at trained positions, and exactly 0 without a gradient elsewhere.

    Args:
        x: ``[T]`` or ``[T, K]``.
        mask: ``[T]``. Only whether it is 0 matters.

    Returns:
        float32 or float64, of the shape of ``x``.
    """
    outside = (mask == 0).reshape(-1, *[1] * (x.dim() - 1))
    return to_compute_dtype(x).masked_fill(outside, 0.0)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return ``logprobs - old_logprobs`` at trained positions and 0 elsewhere, not clamped.

    All tensors are ``[T]``. ``old_logprobs`` gets no gradient.
    """
    return at_trained(logprobs, mask) - at_trained(old_logprobs.detach(), mask)


def bounded(log_ratios: Tensor) -> Tensor:
    """Clamp ``log_ratios`` to :data:`LOG_RATIO_BOUND` on both sides."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def spread(per_sequence: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Repeat the value of each sequence at all its tokens: from ``[n]`` to ``[T]``, differentiable.

    Args:
        per_sequence: ``[n]``.
        cu_seqlens: integers ``[n + 1]``. Boundaries of the sequences.
        tokens: ``T``. Given by the caller, so that no value is read from the device.
    """
    return torch.repeat_interleave(per_sequence, cu_seqlens.diff().long(), dim=0, output_size=tokens)


def mean_where(x: Tensor, keep: Tensor) -> Metric:
    """Return the mean of ``x`` where ``keep`` is True, weighted by the number of kept entries.

    Args:
        x: numbers or booleans.
        keep: bool, of the shape of ``x``. Entries that are False may be NaN in ``x``.
    """
    count = keep.sum()
    # float64: value times weight must reproduce the sum to the last reported digit, for any cut of the batch.
    total = x.detach().double().masked_fill(~keep, 0.0).sum()
    return Metric(total / count.clamp(min=1), weight=count)


def token_mean(x: Tensor, mask: Tensor) -> Metric:
    """Return the mean of ``x`` ``[T]`` over trained positions."""
    return mean_where(x, trained_positions(mask))


def token_max(x: Tensor, mask: Tensor, *, least: float) -> Metric:
    """Return the maximum of ``x`` ``[T]`` over trained positions, or ``least`` if there are none."""
    return Metric(x.detach().masked_fill(mask == 0, least).max(), reduce="max")


def token_count(mask: Tensor) -> Metric:
    """Return the number of trained positions."""
    return Metric(trained_positions(mask).sum(), reduce="sum")
