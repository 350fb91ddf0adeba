"""Samples that name their adapter: the key of a batch, and micro-batches of runs of samples with one adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from areal.utils.data.packing import pack

ADAPTER = "adapter"
"""Per-sequence key of a batch: index in ``engine.adapters.names`` of the adapter of each sample."""


def read_adapters(sequences: Mapping[str, Tensor], others: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the adapter of each sample, or ``None`` if the batch does not name any. Reads the device once.

    Args:
        sequences: per-sequence keys of the batch.
        others: all other keys.

    Raises:
        ValueError: the key is not one integer per sample.
    """
    index = sequences.get(ADAPTER)
    if index is None and ADAPTER not in others:
        return None
    if index is None or index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype.itemsize < 2:
        raise ValueError(
            f"key {ADAPTER!r} is not one integer per sample: pass int64 [B], or a scalar in each sample, with indices in "
            "engine.adapters.names"
        )
    return tuple(index.tolist())


def adapters_of_groups(adapters: Sequence[int], size: int) -> list[int]:
    """Return the adapter of each group of ``size`` consecutive samples.

    Raises:
        ValueError: the samples of a group name different adapters.
    """
    for start in range(0, len(adapters), size):
        if len(set(adapters[start : start + size])) > 1:
            raise ValueError(
                f"key {ADAPTER!r}: samples {start} to {start + size - 1} name different adapters, but MicroBatchSpec.granularity = "
                f"{size} keeps them together: give them one adapter, or lower it"
            )
    return list(adapters[::size])


def merge_bins(
    bins: Sequence[Sequence[list[int]]],
    sizes: Sequence[Sequence[int]],
    budget: int | None,
    *,
    min_bins: int = 1,
    align: int = 1,
) -> list[list[int]]:
    """Merge the bins of several adapters to micro-batches, in which the items of each adapter are consecutive.

    The bins of an adapter stay whole and in order, each in another micro-batch, so that its gradient is a sum of the same terms in the same
    order as in a call with this adapter alone.

    Args:
        bins: bins of each adapter: those of a call with this adapter alone.
        sizes: number of tokens of each bin.
        budget, min_bins, align: see :func:`~areal.utils.data.packing.pack`.
    """
    capacity = None if budget is None else budget // align * align
    merged: list[list[int]] = []
    loads: list[int] = []
    for bins_of_adapter, sizes_of_adapter in zip(bins, sizes, strict=True):
        position = 0
        for members, size in zip(bins_of_adapter, sizes_of_adapter, strict=True):
            # The first micro-batch with enough space after the one with the bin before.
            while position < len(merged) and capacity is not None and loads[position] + size > capacity:
                position += 1
            if position == len(merged):
                merged.append([])
                loads.append(0)
            merged[position] += members
            loads[position] += size
            position += 1
    if len(merged) >= min_bins:
        return merged
    # More micro-batches are wanted than any adapter has alone: spread the bins evenly.
    flat, lengths = list(chain.from_iterable(bins)), list(chain.from_iterable(sizes))
    return [[i for k in part for i in flat[k]] for part in pack(lengths, budget, min_bins=min_bins, align=align)]
