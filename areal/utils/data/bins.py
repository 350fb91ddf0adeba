"""Bins of samples: the samples of each micro-batch of one rank's batch, also of samples that name their adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from torch import Tensor

from areal.api import BatchForm, MicroBatchSpec
from areal.utils.data.packing import pack, pack_sharing
from areal.utils.data.padding import round_up
from areal.utils.data.prefixes import Prefixes

ADAPTER = "adapter"
"""Per-sequence key of a batch: index in ``engine.adapters.names`` of the adapter of each sample."""


def pack_samples(
    form: BatchForm,
    spec: MicroBatchSpec,
    align: int,
    prefixes: Prefixes | None,
    adapters: Sequence[int] | None,
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the samples of each micro-batch, and the samples that were dropped.

    Args:
        form: form of the batch.
        spec: budget and granularity.
        align: the length of a micro-batch is rounded up to a multiple of this.
        prefixes: common prefixes of the samples, if they are shared.
        adapters: adapter of each sample, or ``None``. Samples of one adapter are next to each other in a micro-batch.

    Raises:
        ValueError: the spec does not fit the batch.
    """
    # The unit of packing is a group of ``granularity`` consecutive samples, which stay together.
    size, n = spec.granularity, len(form.seqlens)
    if n % size:
        raise ValueError(
            f"MicroBatchSpec.granularity = {size} does not divide the batch of {n} samples: pass whole groups, or "
            "lower it"
        )
    groups = [_samples_of([g], size) for g in range(n // size)]
    if prefixes is None:
        lengths = [sum(form.seqlens[i] for i in group) for group in groups]
    else:
        lengths = [prefixes.length(group) for group in groups]
    # Groups above the budget get separate micro-batches or are dropped. (With overlong="error", this call raises.)
    fitting, overlong = _split_by_budget(lengths, spec, align)
    alone = overlong if spec.overlong == "alone" else []
    dropped = overlong if spec.overlong == "drop" else []
    if spec.samples_per_mb is not None:
        bins = _consecutive(n // size, spec.samples_per_mb // size, adapters and adapters_of_groups(adapters, size))
    elif adapters is None:
        bins = _pack_groups(fitting, alone, groups, lengths, spec, align, prefixes)
    else:
        # Pack the groups of each adapter as if they were alone, and merge what fits together.
        named = adapters_of_groups(adapters, size)
        packed = []
        for k in sorted(set(named)):
            mine, mine_alone = ([g for g in some if named[g] == k] for some in (fitting, alone))
            packed.append(_pack_groups(mine, mine_alone, groups, lengths, spec, align, prefixes))
        sizes = [[_bin_length(members, groups, lengths, prefixes) for members in bins] for bins in packed]
        bins = merge_bins(packed, sizes, spec.max_tokens_per_mb, min_bins=spec.n_mbs or 1, align=align)
    # From groups back to samples.
    return tuple(_samples_of(members, size) for members in bins), _samples_of(dropped, size)


def _consecutive(n: int, each: int, adapters: Sequence[int] | None) -> list[list[int]]:
    """Return bins of ``each`` consecutive groups of ``n``. Groups of one adapter are next to each other in a bin."""
    bins = [list(range(start, min(start + each, n))) for start in range(0, n, each)]
    return [sorted(members, key=adapters.__getitem__) for members in bins] if adapters else bins


def _pack_groups(
    fitting: Sequence[int],
    alone: Sequence[int],
    groups: Sequence[Sequence[int]],
    lengths: Sequence[int],
    spec: MicroBatchSpec,
    align: int,
    prefixes: Prefixes | None,
) -> list[list[int]]:
    """Return bins of groups. Those in ``alone`` get separate bins."""
    least = max(1, (spec.n_mbs or 1) - len(alone))
    options: dict[str, Any] = {"min_bins": least, "align": align}
    if prefixes is None:
        packed = pack([lengths[g] for g in fitting], spec.max_tokens_per_mb, **options)
    else:
        # Order the groups by their first samples, so that neighbours have the longest common prefixes.
        firsts = {prefixes.sort(groups[g])[0]: g for g in fitting}
        leaders = prefixes.sort(list(firsts))
        fitting = [firsts[i] for i in leaders]
        shared = [0, *(prefixes.shared(a, b) for a, b in pairwise(leaders))]
        packed = pack_sharing([lengths[g] for g in fitting], shared[: len(fitting)], spec.max_tokens_per_mb, **options)
    return [sorted(fitting[i] for i in members) for members in packed] + [[g] for g in alone]


def _bin_length(
    members: Sequence[int], groups: Sequence[Sequence[int]], lengths: Sequence[int], prefixes: Prefixes | None
) -> int:
    """Return the number of tokens of a bin of groups."""
    if prefixes is None:
        return sum(lengths[g] for g in members)
    return prefixes.length([i for g in members for i in groups[g]])


def _samples_of(groups: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the indices of the samples of groups."""
    return tuple(i for g in groups for i in range(g * size, (g + 1) * size))


def _split_by_budget(lengths: Sequence[int], spec: MicroBatchSpec, align: int) -> tuple[list[int], list[int]]:
    """Return the groups within the budget, and the groups above it."""
    budget = spec.max_tokens_per_mb
    if budget is None:
        return list(range(len(lengths))), []
    if budget < align:
        raise ValueError(
            f"MicroBatchSpec.max_tokens_per_mb = {budget} is below the alignment of {align} tokens: raise it to at "
            f"least {align}"
        )
    fitting = [g for g, length in enumerate(lengths) if round_up(length, align) <= budget]
    overlong = [g for g, length in enumerate(lengths) if round_up(length, align) > budget]
    # The message names samples, not groups, and mentions alignment only if it matters.
    if overlong and spec.overlong == "error":
        g, size = overlong[0], spec.granularity
        what = (
            f"sample {g} has" if size == 1 else f"samples {g * size} to {(g + 1) * size - 1} (granularity {size}) have"
        )
        aligned = round_up(lengths[g], align)
        tokens = f"{lengths[g]} tokens" if aligned == lengths[g] else f"{lengths[g]} tokens ({aligned} aligned)"
        raise ValueError(
            f"{what} {tokens}, above MicroBatchSpec.max_tokens_per_mb = {budget}: raise it, shorten the sequence, or set "
            f"overlong='alone' or 'drop'"
        )
    return fitting, overlong


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
    flat = list(zip(chain.from_iterable(bins), chain.from_iterable(sizes), strict=True))
    # A bin beyond the budget is a group that is alone.
    fitting = [(members, size) for members, size in flat if capacity is None or size <= capacity]
    alone = [members for members, size in flat if capacity is not None and size > capacity]
    packed = pack([size for _, size in fitting], budget, min_bins=max(1, min_bins - len(alone)), align=align)
    return [[i for k in part for i in fitting[k][0]] for part in packed] + alone
