"""Streams: the bins of a micro-batch that several devices of one process compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from areal.api import BatchForm, MicroBatchSpec, PrefixTree
from areal.utils.data.bins import pack_samples
from areal.utils.data.prefixes import Prefixes

Bins = tuple[tuple[int, ...], ...]


def spread_over_streams(
    bins: Bins,
    form: BatchForm,
    spec: MicroBatchSpec,
    align: int,
    prefixes: Prefixes | None,
    adapters: Sequence[int] | None,
    streams: int,
) -> tuple[Bins, list[int]]:
    """Return the samples of each stream, and the number of streams of each micro-batch.

    A stream is what a micro-batch is on one device: the budget applies to each stream. The longest streams are in the first micro-batch.

    Args:
        bins: the samples, packed as if each bin were a micro-batch.
        form, spec, align, prefixes, adapters: as for :func:`~areal.utils.data.bins.pack_samples`.
        streams: most streams of a micro-batch.

    Raises:
        ValueError: the spec does not fit the batch.
    """
    if not bins:
        return bins, []
    # As many bins as whole micro-batches have streams: the padding of a stream costs as much as its tokens.
    n_mbs = max(spec.n_mbs or 1, -(-len(bins) // streams))
    even = spec.model_copy(update={"n_mbs": n_mbs * streams})
    bins, _ = pack_samples(form, even, align, prefixes, adapters)
    # Streams of similar lengths are in one micro-batch, where they are padded to the longest.
    bins = tuple(sorted(bins, key=lambda members: -_length(form, prefixes, members)))
    n_mbs = max(min(n_mbs, len(bins)), -(-len(bins) // streams))
    least, more = divmod(len(bins), n_mbs)
    return bins, [least + (k < more) for k in range(n_mbs)]


def join_trees(trees: Sequence[PrefixTree]) -> PrefixTree:
    """Return the tree of the sequences of several trees, which share nothing with each other: end to end."""
    packed = list(accumulate((len(tree.stream_index) for tree in trees), initial=0))
    stream = list(accumulate((len(tree) for tree in trees), initial=0))
    outputs = list(accumulate((len(tree.output_tokens) for tree in trees), initial=0))
    return PrefixTree(
        lengths=tuple(n for tree in trees for n in tree.lengths),
        context_lengths=tuple(n for tree in trees for n in tree.context_lengths),
        context_index=torch.cat([tree.context_index + n for tree, n in zip(trees, stream, strict=False)]),
        tokens=torch.cat([tree.tokens + n for tree, n in zip(trees, packed, strict=False)]),
        stream_index=torch.cat([tree.stream_index + n for tree, n in zip(trees, stream, strict=False)]),
        output_tokens=torch.cat([tree.output_tokens + n for tree, n in zip(trees, packed, strict=False)]),
        output_index=torch.cat([tree.output_index + n for tree, n in zip(trees, outputs, strict=False)]),
    )


def _length(form: BatchForm, prefixes: Prefixes | None, members: Sequence[int]) -> int:
    """Return the number of tokens of a stream."""
    return sum(form.seqlens[i] for i in members) if prefixes is None else prefixes.length(members)
