"""Plan and build the micro-batches of one rank's batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from areal.api import Batch, BatchForm, BatchInput, MicroBatch, MicroBatchList, MicroBatchSpec, PrefixTree
from areal.api.microbatch import MicroBatchLayout
from areal.utils.data.bins import pack_samples, read_adapters
from areal.utils.data.columns import Columns, read_batch
from areal.utils.data.digest import checksum
from areal.utils.data.images import PIXELS, BatchImages, ImageRules, read_images
from areal.utils.data.padding import NO_SAMPLES, KeyForms, round_up
from areal.utils.data.prefixes import IMAGE_ROWS, Prefixes
from areal.utils.data.streams import Bins, join_trees, spread_over_streams
from areal.utils.data.targets import add_targets, check_output_mask, check_target_shape, check_values
from areal.utils.host_copy import HostCopy, TensorMap

LayoutFn = Callable[..., MicroBatchLayout]  # index tensors of a micro-batch on the host, see BatchPlan.build


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """A checked and packed batch of one rank. Ranks then agree on the number of micro-batches, and call :meth:`build`.

    Attributes:
        form: form of the caller's batch.
        bins: indices of the samples of each micro-batch.
        trees: prefix tree of each micro-batch, or ``None``.
        dropped: indices of samples that were dropped for their length.
        align: the length of a micro-batch is rounded up to a multiple of this.
        tokens: per-token keys ``[T, ...]``, all bins end to end.
        sequences: per-sequence keys ``[n, ...]``, all bins end to end.
        payloads: lists of ``n`` tensors, all bins end to end.
        meta: the caller's ``meta``.
        keys: shapes and dtypes of all keys, from which fillers are built.
        derived: names of keys that were computed from other keys.
        idle_ranks: some rank is without a micro-batch with samples.
        adapters: index of the adapter of each of the caller's samples; ``None`` if the batch does not name any.
        named: indices of the adapters that samples of this rank name, or of all ranks after :meth:`naming`.
        streams: the same batch with a bin for each stream, in the order of the micro-batches; ``None`` for one stream each.
        n_streams: number of streams of each micro-batch.
        images: images of the caller's samples; ``None`` for a model of text.
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
    keys: KeyForms
    derived: frozenset[str] = frozenset()
    idle_ranks: bool = False
    adapters: tuple[int, ...] | None = None
    named: frozenset[int] | None = None
    streams: BatchPlan | None = None
    n_streams: tuple[int, ...] = ()
    images: BatchImages | None = None

    @property
    def n_mbs(self) -> int:
        """Number of micro-batches with this rank's samples; 0 without samples, or if all were dropped."""
        return len(self.bins)

    @property
    def padded_length(self) -> int:
        """Length of the longest micro-batch, rounded up to ``align``; the length of a filler without samples."""
        return max((self._aligned(k) for k in range(self.n_mbs)), default=self.align)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the samples that were not dropped, without padding."""
        return sum(self.form.seqlens[i] for members in self.bins for i in members)

    def _aligned(self, k: int) -> int:
        """Return the padded length of micro-batch ``k``. With a prefix tree, shared tokens count once."""
        tree = self.trees[k]
        length = sum(self.form.seqlens[i] for i in self.bins[k]) if tree is None else len(tree)
        return round_up(length, self.align)

    def digest(self) -> int:
        """Return a 63-bit checksum of the caller's keys: names, values and order, without padding (of ``meta``, the names).

        Equal on ranks with the same batch. Different batches have the same checksum about once in ``2**40``.
        """
        # Derived keys follow from the others, so that they add nothing.
        tensors = [(key, x) for key, x in self.tokens.items() if key not in self.derived]
        tensors += self.sequences.items()
        tensors += [(key, x) for key, payload in self.payloads.items() for x in payload]
        if self.images is not None:
            tensors += [(PIXELS, x) for x in (*(each.pixels for each in self.images.distinct), *self.images.rows)]
        tensors.sort(key=lambda item: item[0])
        return checksum(tensors, (self.form.kind, self.form.seqlens, self.bins, sorted(map(str, self.meta))))

    def beside_idle_ranks(self, keys: KeyForms) -> BatchPlan:
        """Return the plan for a call in which some rank is without a micro-batch with samples.

        Args:
            keys: keys of a rank with samples. A rank without micro-batches builds its fillers from them.
        """
        return replace(self, keys=self.keys if self.n_mbs else keys, idle_ranks=True)

    def naming(self, named: frozenset[int] | None) -> BatchPlan:
        """Return the plan for a call in which the samples of all ranks name these adapters."""
        return self if named == self.named else replace(self, named=named)

    def in_streams(self, n_streams: Sequence[int]) -> BatchPlan:
        """Return the plan whose micro-batches are consecutive bins of this one, as streams.

        Args:
            n_streams: number of streams of each micro-batch.
        """
        bins, trees = iter(self.bins), iter(self.trees)
        known = [[tree for tree in islice(trees, n) if tree is not None] for n in n_streams]
        return replace(
            self,
            bins=tuple(tuple(i for members in islice(bins, n) for i in members) for n in n_streams),
            trees=tuple(join_trees(each) if each else None for each in known),
            streams=self,
            n_streams=tuple(n_streams),
        )

    def build(
        self,
        *,
        n_mbs: int,
        device: torch.device,
        padded_length: int | None = None,
        layout: LayoutFn | None = None,
        adapters: Sequence[str] = (),
    ) -> MicroBatchList:
        """Build the micro-batches, with fillers at the end. All host tensors are copied to the device at once.

        Args:
            n_mbs: number of micro-batches, equal on all ranks.
            device: device of their tensors.
            padded_length: common length of all micro-batches, for schedules that need one. By default lengths differ.
            layout: returns :attr:`MicroBatch.layout` on the host, from ``seqlens``, ``padded_length``, ``tree``, ``wanted``,
                ``adapters`` and ``images.bidirectional``.
            adapters: names of the engine's adapters, by index.

        Raises:
            ValueError: ``n_mbs`` or ``padded_length`` is too small, or ``padded_length`` is not aligned.
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
        # All ranks run the same number of micro-batches: fillers make up the difference.
        make_layout = layout or (lambda *_: None)
        named = None if self.named is None else tuple(adapters[k] for k in sorted(self.named))
        mbs = list(self._build_real(padded_length, make_layout, adapters))
        mbs += self._build_fillers(range(len(mbs), n_mbs), torch.device("cpu"), padded_length, make_layout, named)
        if device.type != "cpu" or self.form.device.type != "cpu":
            mbs = _copy_to(mbs, device)
        return MicroBatchList(
            mbs=tuple(mbs), form=self.form, dropped=self.dropped, idle_ranks=self.idle_ranks, adapters=named
        )

    def _build_real(
        self, padded_length: int | None, layout: Callable[..., Any], adapters: Sequence[str]
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches with the caller's samples, on the caller's device."""
        seqlens = [tuple(self.form.seqlens[i] for i in members) for members in self.bins]
        n_tokens, n_seqs = [sum(lengths) for lengths in seqlens], [len(lengths) for lengths in seqlens]
        # Micro-batches are views of the keys of the whole batch.
        tokens = {key: x.split(n_tokens) for key, x in self.tokens.items()}
        sequences = {key: x.split(n_seqs) for key, x in self.sequences.items()}
        payloads = {key: iter(payload) for key, payload in self.payloads.items()}
        starts = [start for lengths in seqlens for start in accumulate(lengths, initial=0)]
        cu_seqlens = torch.tensor(starts, dtype=torch.int32).split([n + 1 for n in n_seqs])
        # The output mask stays on the host, too, where positions can be counted without waiting for the device.
        mask = self.tokens.get("output_mask")
        wanted = [None] * len(n_tokens) if mask is None else mask.cpu().split(n_tokens)
        streams = iter(()) if self.streams is None else self.streams._build_real(None, layout, adapters)
        for k, members in enumerate(self.bins):
            values: dict[str, Any] = {key: tensors[k] for key, tensors in (tokens | sequences).items()}
            values |= {key: [next(items) for _ in members] for key, items in payloads.items()}
            length = padded_length or self._aligned(k)
            named = None if self.adapters is None else tuple(adapters[self.adapters[i]] for i in members)
            images = None if self.images is None else self.images.of_samples(members)
            yield MicroBatch(
                index=k,
                data=Batch(values, cu_seqlens[k], self.meta),
                seqlens=seqlens[k],
                cu_seqlens=cu_seqlens[k],
                sample_ids=members,
                padded_length=length,
                tree=self.trees[k],
                wanted=wanted[k],
                layout=layout(seqlens[k], length, self.trees[k], wanted[k], named, images and images.bidirectional),
                adapters=named,
                streams=() if self.streams is None else tuple(islice(streams, self.n_streams[k])),
                images=images,
            )

    def _build_fillers(
        self,
        indices: range,
        device: torch.device,
        padded_length: int | None,
        layout: Callable[..., Any],
        named: tuple[str, ...] | None,
    ) -> Iterator[MicroBatch]:
        """Yield dummy micro-batches of one token, which all use the same tensors."""
        if not indices:
            return
        cu_seqlens, values = torch.tensor([0, 1], dtype=torch.int32, device=device), self.keys.filler(device)
        wanted = torch.zeros(1, dtype=torch.bool) if "output_mask" in values else None
        length = padded_length or self.align
        # A filler must not add a zero to the gradient of an adapter that the call does not name.
        adapter = None if named is None else named[:1]
        index_tensors = layout((1,), length, None, wanted, adapter, None)
        images = None if self.images is None else self.images.of_samples(())
        for k in indices:
            yield MicroBatch(
                index=k,
                data=Batch(values, cu_seqlens, self.meta),
                seqlens=(1,),
                cu_seqlens=cu_seqlens,
                sample_ids=(),
                padded_length=length,
                filler=True,
                wanted=wanted,
                layout=index_tensors,
                adapters=adapter,
                images=images,
            )


def _copy_to(mbs: Sequence[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """Return micro-batches on a device, by one copy of all tensors that are on the host."""

    def mapped(mb: MicroBatch, fn: TensorMap) -> MicroBatch:
        keys = {key: x for key, x in mb.data.items() if key not in ("cu_seqlens", "meta")}
        values = {key: [fn(item) for item in x] if isinstance(x, list) else fn(x) for key, x in keys.items()}
        cu_seqlens, layout = fn(mb.cu_seqlens), None if mb.layout is None else mb.layout.map(fn)
        images = None if mb.images is None else mb.images.map(fn)
        data = Batch(values, cu_seqlens, mb.data.meta)
        return replace(mb, data=data, cu_seqlens=cu_seqlens, layout=layout, images=images)

    copy = HostCopy(device)
    for mb in mbs:
        mapped(mb, copy.add)
    copy.run()
    return [mapped(mb, copy.get) for mb in mbs]


def plan_batch(
    batch: BatchInput,
    spec: MicroBatchSpec,
    *,
    align: int = 1,
    vocab_size: int | None = None,
    trees: bool = True,
    streams: int = 1,
    images: ImageRules | None = None,
) -> BatchPlan:
    """Check a rank's batch and divide it into micro-batches, without communication.

    The caller's dict and tensors are not changed. Later changes to them do not affect the plan, except changes to payloads,
    which are not copied. A batch without samples is valid: its plan is without micro-batches. See
    :func:`~areal.utils.data.columns.read_batch` for the forms of a batch.

    Args:
        batch: padded dict or list of samples.
        spec: budget and granularity.
        align: the length of a micro-batch is rounded up to a multiple of this. The budget includes it.
        vocab_size: upper bound of ``input_ids`` and ``target_ids``. ``None``: only negative ids are refused.
        trees: build the prefix trees of ``spec.share_prefixes``. A caller that only checks the batch needs none.
        streams: streams of a micro-batch, each of which has the budget.
        images: the images that the model takes; ``None`` for a model of text.

    Raises:
        ValueError: the batch is invalid, or a sequence exceeds the budget and ``spec.overlong`` is ``"error"``. The error
            names the key, the value and the way out.
    """
    # 1. Bring both forms of a batch to columns, and check them.
    columns = read_batch(batch, spec)
    if not columns.form.seqlens:
        return _empty_plan(columns, align, images)
    seeing = images is not None or columns.images
    pictures = read_images(columns.tokens["input_ids"], columns.images, images) if seeing else None
    if "target_ids" in columns.tokens:
        check_target_shape(columns.tokens["target_ids"][0])
    if "output_mask" in columns.tokens:
        check_output_mask(columns.tokens["output_mask"][0])

    # 2. Pack: assign samples to micro-batches by their lengths. With shared prefixes, common tokens count once.
    adapters = read_adapters(columns.sequences, {**columns.tokens, **columns.payloads})
    of_images = {} if pictures is None else {IMAGE_ROWS: pictures.prefix_keys()}
    prefixes = Prefixes({**columns.tokens, **of_images}, adapters) if spec.share_prefixes else None
    bins, dropped, n_streams = _pack(columns.form, spec, align, prefixes, adapters, streams)

    # 3. Concatenate per-token keys in packed order. This copies the caller's tensors.
    order = [i for members in bins for i in members]
    seqlens = [columns.form.seqlens[i] for i in order]
    tokens = _joined(columns.tokens, order)

    # 4. Targets, from complete sequences: a slice of a sequence would not know its next token.
    device = columns.form.device
    ends = torch.tensor(list(accumulate(seqlens)), dtype=torch.int64).to(device) - 1
    if order:
        check_values(tokens, columns.sequences.get("temperature"), vocab_size, order, seqlens)
    tokens = add_targets(tokens, ends)

    # 5. Per-sequence keys in packed order, and prefix trees, which depend on the targets.
    index = torch.tensor(order, dtype=torch.int64).to(device)
    sequences = {key: x.index_select(0, index) for key, x in columns.sequences.items()}
    plan = BatchPlan(
        form=columns.form,
        bins=bins,
        trees=_build_trees(prefixes if trees else None, bins, columns.form, tokens, sequences),
        dropped=dropped,
        align=align,
        tokens=tokens,
        sequences=sequences,
        payloads={key: [payload[i] for i in order] for key, payload in columns.payloads.items()},
        meta=columns.meta,
        keys=KeyForms.of(tokens, sequences, columns.payloads),
        derived=frozenset(tokens) - set(columns.tokens),
        adapters=adapters,
        named=None if adapters is None else frozenset(adapters[i] for i in order),
        images=pictures,
    )
    return plan if streams == 1 else plan.in_streams(n_streams)


def _empty_plan(columns: Columns, align: int, images: ImageRules | None) -> BatchPlan:
    """Return the plan of a batch without samples."""
    pictures = None if images is None else BatchImages(images)
    return BatchPlan(columns.form, (), (), (), align, {}, {}, {}, columns.meta, NO_SAMPLES, images=pictures)


def _joined(columns: Mapping[str, Sequence[Tensor]], order: Sequence[int]) -> dict[str, Tensor]:
    """Return per-token keys ``[T, ...]`` of samples in packed order."""
    tokens = {key: torch.cat([rows[i] for i in order] or [rows[0][:0]]) for key, rows in columns.items()}
    integers = {key: tokens[key].to(torch.int64) for key in ("input_ids", "target_ids") if key in tokens}
    return tokens | integers


def _pack(
    form: BatchForm,
    spec: MicroBatchSpec,
    align: int,
    prefixes: Prefixes | None,
    adapters: Sequence[int] | None,
    streams: int,
) -> tuple[Bins, tuple[int, ...], list[int]]:
    """Return the samples of each stream, the samples that were dropped, and the number of streams of each micro-batch."""
    bins, dropped = pack_samples(form, spec, align, prefixes, adapters)
    if streams == 1:
        return bins, dropped, [1] * len(bins)
    bins, n_streams = spread_over_streams(bins, form, spec, align, prefixes, adapters, streams)
    return bins, dropped, n_streams


def _build_trees(
    prefixes: Prefixes | None,
    bins: Sequence[Sequence[int]],
    form: BatchForm,
    tokens: Mapping[str, Tensor],
    sequences: Mapping[str, Tensor],
) -> tuple[PrefixTree | None, ...]:
    """Return the prefix tree of each bin, if there are prefixes. ``tokens`` and ``sequences`` are those of all bins end to end."""
    if prefixes is None:
        return (None,) * len(bins)
    # Keys that outputs depend on, expanded to packed tokens.
    output_keys = [tokens[key].cpu() for key in ("target_ids", "output_mask") if key in tokens]
    lengths = torch.tensor([form.seqlens[i] for members in bins for i in members], dtype=torch.int64)
    if "temperature" in sequences and sequences["temperature"].dim() == 1:
        output_keys.append(sequences["temperature"].cpu().repeat_interleave(lengths))
    n_tokens = [sum(form.seqlens[i] for i in members) for members in bins]
    keys_by_bin = zip(*(x.split(n_tokens) for x in output_keys), strict=True)
    return tuple(prefixes.tree(members, keys) for members, keys in zip(bins, keys_by_bin, strict=True))
