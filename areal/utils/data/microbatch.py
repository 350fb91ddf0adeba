"""From a rank's batch to its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX, Batch, BatchForm, BatchInput, MicroBatch, MicroBatchList, MicroBatchSpec, PrefixTree
from areal.utils.data.columns import Columns, read_batch
from areal.utils.data.digest import checksum
from areal.utils.data.packing import pack, pack_sharing
from areal.utils.data.padding import round_up
from areal.utils.data.prefixes import Prefixes
from areal.utils.data.targets import add_targets, check_output_mask, check_target_shape, check_values


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """A checked batch of one rank, packed; what is still open is on how many micro-batches the ranks agree.

    Attributes:
        form: of the caller's batch.
        bins: the samples of each micro-batch.
        trees: for each micro-batch, what its samples share where that is computed once.
        dropped: samples left out for their length.
        align: what the length of a micro-batch is rounded up to a multiple of.
        tokens: per-token keys ``[T, ...]`` of all bins end to end.
        sequences: per-sequence keys ``[n, ...]`` likewise.
        payloads: lists of ``n`` tensors likewise.
        meta: the caller's ``meta``.
        filler: the keys of a filler micro-batch.
        derived: keys that were made of the others.
    """

    form: BatchForm
    bins: tuple[tuple[int, ...], ...]
    trees: tuple[PrefixTree | None, ...]
    dropped: tuple[int, ...]
    align: int
    tokens: Mapping[str, Tensor]
    sequences: Mapping[str, Tensor]
    payloads: Mapping[str, list[Tensor]]
    meta: Mapping[str, Any]
    filler: Mapping[str, Any]
    derived: frozenset[str]

    @property
    def n_mbs(self) -> int:
        """Micro-batches that this rank's samples need; 0 when all were dropped."""
        return len(self.bins)

    @property
    def padded_length(self) -> int:
        """The longest micro-batch, rounded up to ``align``; that of a filler when there is no other."""
        return max((self._aligned(k) for k in range(self.n_mbs)), default=self.align)

    @property
    def n_tokens(self) -> int:
        """Tokens of the samples that were not dropped, unpadded."""
        return sum(self.form.seqlens[i] for members in self.bins for i in members)

    def _aligned(self, k: int) -> int:
        tree = self.trees[k]
        length = sum(self.form.seqlens[i] for i in self.bins[k]) if tree is None else len(tree)
        return round_up(length, self.align)

    def digest(self) -> int:
        """A 63-bit checksum of the names, values and order of the keys that were given (of ``meta``, the names), padding excluded.

        Equal on ranks that were given the same batch; different batches agree about once in ``2**40``.
        """
        tensors = [(key, x) for key, x in self.tokens.items() if key not in self.derived]
        tensors += self.sequences.items()
        tensors += [(key, x) for key, payload in self.payloads.items() for x in payload]
        tensors.sort(key=lambda item: item[0])
        return checksum(tensors, (self.form.kind, self.form.seqlens, self.bins, sorted(map(str, self.meta))))

    def build(self, *, n_mbs: int, device: torch.device, padded_length: int | None = None) -> MicroBatchList:
        """Make the micro-batches, with fillers at the end.

        Args:
            n_mbs: micro-batches on every rank.
            device: where their tensors are put. Each key is copied at once.
            padded_length: one length for all micro-batches, for schedules that need it; by default each has its own.

        Raises:
            ValueError: ``n_mbs`` or ``padded_length`` is too small, or the latter is not aligned.
        """
        if n_mbs < max(1, self.n_mbs):
            raise ValueError(
                f"n_mbs = {n_mbs}: this rank's samples need {self.n_mbs} micro-batches, and a step at least 1"
            )
        if padded_length is not None and (padded_length < self.padded_length or padded_length % self.align):
            raise ValueError(
                f"padded_length = {padded_length}: it is at least that of the longest micro-batch, "
                f"{self.padded_length}, and a multiple of {self.align}"
            )
        mbs = list(self._real(device, padded_length))
        mbs += self._fillers(range(len(mbs), n_mbs), device, padded_length)
        return MicroBatchList(mbs=tuple(mbs), form=self.form, dropped=self.dropped)

    def _real(self, device: torch.device, padded_length: int | None) -> Iterator[MicroBatch]:
        seqlens = [tuple(self.form.seqlens[i] for i in members) for members in self.bins]
        n_tokens, n_seqs = [sum(lengths) for lengths in seqlens], [len(lengths) for lengths in seqlens]
        tokens = {key: x.to(device).split(n_tokens) for key, x in self.tokens.items()}
        sequences = {key: x.to(device).split(n_seqs) for key, x in self.sequences.items()}
        payloads = {key: iter([x.to(device) for x in payload]) for key, payload in self.payloads.items()}
        starts = [start for lengths in seqlens for start in accumulate(lengths, initial=0)]
        cu_seqlens = torch.tensor(starts, dtype=torch.int32).to(device).split([n + 1 for n in n_seqs])
        mask = self.tokens.get("output_mask")
        wanted = [None] * len(n_tokens) if mask is None else mask.cpu().split(n_tokens)
        for k, members in enumerate(self.bins):
            values: dict[str, Any] = {key: parts[k] for key, parts in (tokens | sequences).items()}
            values |= {key: [next(items) for _ in members] for key, items in payloads.items()}
            yield MicroBatch(
                index=k,
                data=Batch(values, cu_seqlens[k], self.meta),
                seqlens=seqlens[k],
                cu_seqlens=cu_seqlens[k],
                sample_ids=members,
                padded_length=padded_length or self._aligned(k),
                tree=self.trees[k],
                wanted=wanted[k],
            )

    def _fillers(self, indices: Iterable[int], device: torch.device, padded_length: int | None) -> Iterator[MicroBatch]:
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=device)
        values = {
            key: [x.to(device) for x in v] if isinstance(v, list) else v.to(device) for key, v in self.filler.items()
        }
        for k in indices:
            yield MicroBatch(
                index=k,
                data=Batch(values, cu_seqlens, self.meta),
                seqlens=(1,),
                cu_seqlens=cu_seqlens,
                sample_ids=(),
                padded_length=padded_length or self.align,
                filler=True,
                wanted=torch.zeros(1, dtype=torch.bool) if "output_mask" in values else None,
            )


def plan_batch(batch: BatchInput, spec: MicroBatchSpec, *, align: int = 1, vocab_size: int | None = None) -> BatchPlan:
    """Check a rank's batch and cut it into micro-batches, without a word to other ranks.

    The caller's dict and tensors are left as they are, and later changes to them do not reach the plan (payloads
    excepted, which are not copied). See :func:`~areal.utils.data.columns.read_batch` for what a batch may be.

    Args:
        batch: padded dict or list of samples.
        spec: budget and granularity.
        align: what the length of a micro-batch is rounded up to a multiple of; the budget holds after it.
        vocab_size: ids of ``input_ids`` and ``target_ids`` are below it; ``None`` only refuses negative ones.

    Raises:
        ValueError: the batch is wrong, or a sequence is above the budget and ``spec.overlong`` is ``"error"``; names
            the key, the value and the way out.
    """
    columns = read_batch(batch, spec)
    if "target_ids" in columns.tokens:
        check_target_shape(columns.tokens["target_ids"][0])
    if "output_mask" in columns.tokens:
        check_output_mask(columns.tokens["output_mask"][0])
    prefixes = Prefixes(columns.tokens) if spec.share_prefixes else None
    bins, dropped = _cut(columns.form, spec, align, prefixes)
    order = [i for members in bins for i in members]
    seqlens = [columns.form.seqlens[i] for i in order]
    tokens = {key: torch.cat([rows[i] for i in order] or [rows[0][:0]]) for key, rows in columns.tokens.items()}
    for key in ("input_ids", "target_ids"):
        if key in tokens:
            tokens[key] = tokens[key].to(torch.int64)
    device = columns.form.device
    ends = torch.tensor(list(accumulate(seqlens)), dtype=torch.int64).to(device) - 1
    if order:
        check_values(tokens, columns.sequences.get("temperature"), vocab_size, order, seqlens)
    tokens = add_targets(tokens, ends)
    index = torch.tensor(order, dtype=torch.int64).to(device)
    sequences = {key: x.index_select(0, index) for key, x in columns.sequences.items()}
    return BatchPlan(
        form=columns.form,
        bins=bins,
        trees=(None,) * len(bins) if prefixes is None else _trees(prefixes, bins, columns.form, tokens, sequences),
        dropped=dropped,
        align=align,
        tokens=tokens,
        sequences=sequences,
        payloads={key: [payload[i] for i in order] for key, payload in columns.payloads.items()},
        meta=columns.meta,
        filler=_filler(tokens, columns),
        derived=frozenset(tokens) - set(columns.tokens),
    )


def _cut(
    form: BatchForm, spec: MicroBatchSpec, align: int, prefixes: Prefixes | None
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Bins of samples, and the samples that were dropped."""
    size, n = spec.granularity, len(form.seqlens)
    if n % size:
        raise ValueError(
            f"MicroBatchSpec.granularity = {size} does not divide the batch of {n} samples: pass whole groups, or "
            "lower it"
        )
    groups = [_samples([g], size) for g in range(n // size)]
    if prefixes is None:
        lengths = [sum(form.seqlens[i] for i in group) for group in groups]
    else:
        lengths = [prefixes.length(group) for group in groups]
    fitting, overlong = _sort_out(lengths, spec, align)
    alone = overlong if spec.overlong == "alone" else []
    least = max(1, (spec.n_mbs or 1) - len(alone))
    options: dict[str, Any] = {"min_bins": least, "align": align}
    if prefixes is None:
        packed = pack([lengths[g] for g in fitting], spec.max_tokens_per_mb, **options)
    else:
        firsts = {prefixes.sort(groups[g])[0]: g for g in fitting}
        leaders = prefixes.sort(list(firsts))
        fitting = [firsts[i] for i in leaders]
        shared = [0, *(prefixes.shared(a, b) for a, b in pairwise(leaders))]
        packed = pack_sharing([lengths[g] for g in fitting], shared[: len(fitting)], spec.max_tokens_per_mb, **options)
    bins = [sorted(fitting[i] for i in members) for members in packed] + [[g] for g in alone]
    dropped = overlong if spec.overlong == "drop" else []
    return tuple(_samples(members, size) for members in bins), _samples(dropped, size)


def _trees(
    prefixes: Prefixes,
    bins: Sequence[Sequence[int]],
    form: BatchForm,
    tokens: Mapping[str, Tensor],
    sequences: Mapping[str, Tensor],
) -> tuple[PrefixTree, ...]:
    """For each bin the stream that the model sees. ``tokens`` and ``sequences`` are those of all bins end to end."""
    asked = [tokens[key].cpu() for key in ("target_ids", "output_mask") if key in tokens]
    lengths = torch.tensor([form.seqlens[i] for members in bins for i in members])
    if "temperature" in sequences and sequences["temperature"].dim() == 1:
        asked.append(sequences["temperature"].cpu().repeat_interleave(lengths))
    n_tokens = [sum(form.seqlens[i] for i in members) for members in bins]
    parts = zip(*(x.split(n_tokens) for x in asked), strict=True)
    return tuple(prefixes.tree(members, part) for members, part in zip(bins, parts, strict=True))


def _samples(groups: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(i for g in groups for i in range(g * size, (g + 1) * size))


def _sort_out(lengths: Sequence[int], spec: MicroBatchSpec, align: int) -> tuple[list[int], list[int]]:
    """Groups within the budget, and those above it."""
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


def _filler(tokens: Mapping[str, Tensor], columns: Columns) -> dict[str, Any]:
    """One token of id 0 without a target. Per-sequence values are the first sample's: a zero temperature would make
    NaNs."""
    filler: dict[str, Any] = {key: x.new_zeros((1, *x.shape[1:])) for key, x in tokens.items()}
    filler["target_ids"].fill_(IGNORE_INDEX)
    filler |= {key: x[:1].clone() for key, x in columns.sequences.items()}
    filler |= {key: [payload[0].new_zeros((0, *payload[0].shape[1:]))] for key, payload in columns.payloads.items()}
    return filler
