"""The division of a batch over data-parallel coordinates, and the results of the shards in the caller's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api import BatchForm, MicroBatch, MicroBatchList, MicroBatchSpec, StepOutput
from areal.api.engine import BatchInput
from areal.engine.batch_rules import empty_batch
from areal.utils.data import BatchPlan, deal, deal_sharing, plan_batch, read_batch, sequence_cost
from areal.utils.data.prefixes import HIDDEN_STATE_KEYS, IMAGE_ROWS, Prefixes

ATTENTION = 2e-5
"""Cost of attention in :func:`~areal.utils.data.sequence_cost`: that of models with 1 to 70 billion parameters is 1e-5 to 4e-5."""

IMAGE_TOKEN = 0.4
"""Cost of encoding what a token of an image stands for, relative to a token of text: 4 patches in a tower of a tenth of the parameters."""

Indices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """The shards of a batch, and what merges their results.

    With one coordinate the batch is its own shard.

    Attributes:
        shards: what each coordinate receives, in the caller's form: a list of samples, or a padded dict of the same width. A coordinate
            without samples receives ``[]`` or a dict with zero rows.
        spec: rules by which the batch was read.
        divided: form of the batch, and samples of each coordinate; ``None`` for a batch that only the engine checks.
    """

    shards: tuple[BatchInput, ...]
    spec: MicroBatchSpec
    divided: tuple[BatchForm, Indices] | None = None

    @cached_property
    def form(self) -> BatchForm:
        """Form of the caller's batch."""
        return read_batch(self.shards[0], self.spec).form if self.divided is None else self.divided[0]

    @cached_property
    def indices(self) -> Indices:
        """Samples of each coordinate, in ascending order."""
        return (tuple(range(len(self.form.seqlens))),) if self.divided is None else self.divided[1]

    def merge(self, results: Sequence[Any]) -> Any:
        """Return the results of all samples in the caller's order, and on the caller's device.

        Args:
            results: result of each coordinate: a list with a value of any type for each of its samples, or a tensor ``[B_i, ...]`` with a row
                for each; or a dict, a tuple or a named tuple of these. Results of coordinates without samples are ignored.

        Returns:
            The same structure, with lists of ``B`` values and tensors ``[B, ...]``.

        Raises:
            ValueError: results differ in structure, dtype or shape, or have another number of values than samples.
        """
        if len(results) != len(self.shards):
            raise ValueError(
                f"merge got {len(results)} results for {len(self.shards)} coordinates: pass one for each, in order"
            )
        if self.divided is None:
            return results[0]
        with_samples = [rank for rank, members in enumerate(self.indices) if members]
        return self._merged([results[rank] for rank in with_samples], with_samples, "the result")

    def merge_steps(self, results: Sequence[tuple[Any, dict[str, Any]]]) -> StepOutput:
        """Return the step with the outputs of all samples in the caller's order.

        Args:
            results: for each coordinate the step, which is ``None`` except for the first, and its per-token outputs by name.
        """
        step: StepOutput = results[0][0]
        named = results[0][1]
        return replace(step, outputs=self.merge([outputs for _, outputs in results])) if named else step

    def _merged(self, parts: list[Any], ranks: list[int], what: str) -> Any:
        """Merge the results of the coordinates ``ranks``."""
        first = parts[0]
        for rank, part in zip(ranks, parts, strict=True):
            if type(part) is not type(first) or (isinstance(part, dict) and part.keys() != first.keys()):
                raise ValueError(
                    f"{what} is {_described(first)} on coordinate {ranks[0]} and {_described(part)} on coordinate {rank}: return the same "
                    "structure on all"
                )
        # Containers keep their type. A list holds one value for each sample, so that only its order changes.
        if isinstance(first, dict):
            return {key: self._merged([part[key] for part in parts], ranks, f"{what}[{key!r}]") for key in first}
        if isinstance(first, tuple):
            if any(len(part) != len(first) for part in parts):
                raise ValueError(
                    f"{what} has {[len(part) for part in parts]} items on coordinates {ranks}: return the same number on all"
                )
            items = [
                self._merged(list(column), ranks, f"{what}[{i}]") for i, column in enumerate(zip(*parts, strict=True))
            ]
            return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
        if not isinstance(first, list | Tensor):
            raise ValueError(
                f"{what} is {_described(first)}: return a list with a value for each sample, a tensor with a row for each, or a dict or tuple "
                "of these"
            )
        for rank, part in zip(ranks, parts, strict=True):
            count = len(part) if isinstance(part, list) or part.dim() else 0
            if count != len(self.indices[rank]):
                raise ValueError(
                    f"{what} of coordinate {rank} has {count} values for {len(self.indices[rank])} samples: return one for each, in order"
                )
        return self._rows(parts, ranks, what) if isinstance(first, Tensor) else self._items(parts, ranks)

    def _rows(self, parts: list[Tensor], ranks: list[int], what: str) -> Tensor:
        forms = {(tuple(part.shape[1:]), part.dtype) for part in parts}
        if len(forms) > 1:
            raise ValueError(
                f"{what} has rows of {sorted(map(str, forms))} on different coordinates: return one shape and dtype on all"
            )
        order = torch.tensor([i for rank in ranks for i in self.indices[rank]])
        rows = torch.cat([part.to(self.form.device) for part in parts])
        # Row k of the concatenation is of sample order[k].
        return torch.empty_like(rows).index_copy_(0, order.to(rows.device), rows)

    def _items(self, parts: list[list[Any]], ranks: list[int]) -> list[Any]:
        def here(x: Tensor) -> Tensor:
            return x.to(self.form.device)

        merged: list[Any] = [None] * len(self.form.seqlens)
        for rank, part in zip(ranks, parts, strict=True):
            for i, value in zip(self.indices[rank], part, strict=True):
                merged[i] = here(value) if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, here, value)
        return merged


@dataclass(frozen=True)
class RemoteMicroBatches(MicroBatchList):
    """The layout of the micro-batches of all coordinates. Their tensors are on the ranks.

    ``real``, ``n_tokens`` and ``restore`` work as for the micro-batches of an engine: micro-batches are ordered by coordinate, and samples have
    their index in the caller's batch.

    Attributes:
        key: name of the micro-batches on the ranks.
    """

    key: str = ""


def joined_layouts(plan: ShardPlan, lists: Sequence[MicroBatchList], key: str) -> RemoteMicroBatches:
    """Return the micro-batches of all coordinates as one list.

    Args:
        plan: division of the batch.
        lists: layouts of the micro-batches of each coordinate.
        key: name of the micro-batches on the ranks.
    """
    real: list[MicroBatch] = []
    for samples, mbs in zip(plan.indices, lists, strict=True):
        for mb in mbs.real:
            sample_ids = tuple(samples[i] for i in mb.sample_ids)
            real.append(replace(mb, index=len(real), sample_ids=sample_ids))
    dropped = sorted(samples[i] for samples, mbs in zip(plan.indices, lists, strict=True) for i in mbs.dropped)
    # All ranks name the same adapters.
    adapters = lists[0].adapters
    return RemoteMicroBatches(mbs=tuple(real), form=plan.form, dropped=tuple(dropped), adapters=adapters, key=key)


def _described(value: Any) -> str:
    keys = f" with the keys {list(value)}" if isinstance(value, dict) else ""
    return f"a {type(value).__name__}{keys}"


def plan_shards(
    batch: BatchInput, spec: MicroBatchSpec, n: int, *, check: Callable[[BatchInput], BatchPlan] | None = None
) -> ShardPlan:
    """Check a global batch as an engine checks it, and divide it by the cost of its samples.

    Samples move in units of ``spec.granularity`` consecutive samples. There may be fewer units than coordinates: the last coordinates are
    then without samples. Nothing is padded.

    Costs are those of :func:`~areal.utils.data.sequence_cost`, and the largest cost of a coordinate is at most 4/3 of that of the best
    division. With ``spec.share_prefixes``, units with common prefixes stay together:

    1. Neighbours in lexicographic order that share at least 1/16 of their tokens form a family, as in the packing of micro-batches.
    2. A family that costs more than ``1/n`` of the batch is divided where its members share least, until each part costs less, or is one
       unit. So a family whose prompts begin with one system prompt is divided between prompts, before a prompt is.
    3. The most expensive part goes to the coordinate that has the smallest cost with it. A token that the part shares with what the
       coordinate already has costs nothing there.

    Samples that an engine drops for their length cost nothing, and are dealt evenly.

    Args:
        batch: list of samples, or padded dict. Tensors stay on their device until
            :func:`~areal.dispatch.wire.pack_tensors` copies them to the host.
        spec: rules of the engines.
        n: number of coordinates. With 1, the batch is not copied.
        check: checks a batch and packs it: :meth:`~areal.engine.batch_rules.BatchRules.plan` of the engine. Defaults to
            :func:`~areal.utils.data.plan_batch`, which knows neither the vocabulary nor the alignment.

    Raises:
        ValueError: the batch is invalid, with the text of an engine's error; or the batch is empty.
    """
    plan = plan_batch(batch, spec, trees=False) if check is None else check(batch)
    if not plan.n_mbs:
        raise empty_batch(len(plan.dropped))
    if n == 1:
        return ShardPlan((batch,), spec, (plan.form, (tuple(range(len(plan.form.seqlens))),)))

    # A unit is ``granularity`` consecutive samples. Engines drop complete units.
    size, dropped = spec.granularity, set(plan.dropped)
    units = range(len(plan.form.seqlens) // size)
    kept = [unit for unit in units if unit * size not in dropped]
    if spec.share_prefixes:
        dealt = _deal_families(_prefixes(batch, plan), kept, size, plan.form.seqlens, n)
    else:
        costs = [sum(_cost_of(plan, i) for i in range(unit * size, (unit + 1) * size)) for unit in kept]
        dealt = [[kept[k] for k in members] for members in deal(costs, n)]
    for k, unit in enumerate(sorted(set(units) - set(kept))):
        dealt[k % n].append(unit)

    # From units to samples, in the caller's order.
    indices = tuple(
        tuple(i for unit in sorted(members) for i in range(unit * size, (unit + 1) * size)) for members in dealt
    )
    if plan.form.kind == "list":
        _check_kinds(plan, spec, indices)
    return ShardPlan(tuple(_select(batch, members) for members in indices), spec, (plan.form, indices))


def _select(batch: BatchInput, members: Sequence[int]) -> BatchInput:
    """Return some samples of a batch, in its form."""
    if not isinstance(batch, Mapping):
        return [batch[i] for i in members]
    index = torch.tensor(members, dtype=torch.int64)
    return {key: _selected(value, members, index) if key != "meta" else value for key, value in batch.items()}


def _selected(value: Tensor | Sequence[Tensor], members: Sequence[int], index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value.detach().index_select(0, index.to(value.device))
    return [value[i] for i in members]


def _check_kinds(plan: BatchPlan, spec: MicroBatchSpec, indices: Indices) -> None:
    """Raise if an engine would read a per-sequence key of a list differently in a shard, whose samples are fewer.

    Raises:
        ValueError: names the key, the samples and the way out.
    """
    rows = {key: x.shape[1] for key, x in plan.sequences.items() if x.dim() > 1 and key not in spec.per_sequence}
    for key, row in rows.items():
        for members in indices:
            lengths = {plan.form.seqlens[i] for i in members}
            if lengths and (lengths == {row} or all(abs(length - row) == 1 for length in lengths)):
                raise ValueError(
                    f"key {key!r} is ambiguous: it has {row} rows, and samples {list(members)}, which go to one data-parallel rank, have "
                    f"{sorted(lengths)} tokens, so that it may be per-sequence or per-token there; name it in MicroBatchSpec.per_sequence"
                )


def _cost(length: int) -> float:
    return sequence_cost(length, ATTENTION)


def _cost_of(plan: BatchPlan, sample: int) -> float:
    """Return the cost of a sample, with that of encoding its images."""
    images = 0 if plan.images is None else plan.images.n_tokens(sample)
    return _cost(plan.form.seqlens[sample]) + IMAGE_TOKEN * images


# ---- shared prefixes


def _prefixes(batch: BatchInput, plan: BatchPlan) -> Prefixes:
    """Return the common prefixes of a checked batch."""

    def column(key: str) -> list[Tensor]:
        rows = batch[key] if isinstance(batch, Mapping) else [sample[key] for sample in batch]
        return [row[:length] for row, length in zip(rows, plan.form.seqlens, strict=True)]

    first: Mapping[str, Any] = batch if isinstance(batch, Mapping) else batch[0]
    keys = {key: column(key) for key in first if key in HIDDEN_STATE_KEYS}
    return Prefixes(keys if plan.images is None else {**keys, IMAGE_ROWS: plan.images.prefix_keys()}, plan.adapters)


def _deal_families(
    prefixes: Prefixes, units: Sequence[int], size: int, seqlens: Sequence[int], n: int
) -> list[list[int]]:
    """Deal units of ``size`` samples with common prefixes to ``n`` coordinates."""
    # Order units by their first samples, so that neighbours have the longest common prefixes.
    samples = {unit: prefixes.sort(range(unit * size, (unit + 1) * size)) for unit in units}
    ordered = {members[0]: unit for unit, members in samples.items()}
    leaders = prefixes.sort(list(ordered))

    # Tokens that several samples share are computed once, and cost once.
    def shared(a: int, b: int) -> float:
        return _cost(prefixes.shared(a, b))

    costs = [
        sum(_cost(seqlens[i]) for i in members) - sum(shared(a, b) for a, b in pairwise(members))
        for members in (samples[ordered[leader]] for leader in leaders)
    ]
    links = [0.0, *(shared(a, b) for a, b in pairwise(leaders))]
    return [[ordered[leaders[k]] for k in members] for members in deal_sharing(costs, links, n)]
