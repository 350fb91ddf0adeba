"""Micro-batches of samples that name their adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import MicroBatchSpec
from areal.dispatch.shards import plan_shards
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.stream.layout import AdapterRuns, StreamLayout
from areal.utils.data import plan_batch

NAMES = ("first", "second", "third")
Sample = dict[str, Tensor]


def samples_of(lengths: tuple[int, ...], adapters: tuple[int, ...]) -> list[Sample]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [
        {"input_ids": torch.randint(0, 50, (n,), generator=generator), "adapter": torch.tensor(k)}
        for n, k in zip(lengths, adapters, strict=True)
    ]


LENGTHS = (9, 30, 4, 21, 17, 3, 25, 8, 40, 12)
ADAPTERS = (2, 0, 1, 2, 0, 0, 2, 1, 0, 2)


@pytest.mark.parametrize(
    "spec",
    [
        MicroBatchSpec(),
        MicroBatchSpec(max_tokens_per_mb=40),
        MicroBatchSpec(max_tokens_per_mb=64),
        MicroBatchSpec(n_mbs=3),
        MicroBatchSpec(max_tokens_per_mb=35, overlong="alone"),
        MicroBatchSpec(max_tokens_per_mb=35, overlong="drop"),
        MicroBatchSpec(max_tokens_per_mb=64, share_prefixes=True),
        MicroBatchSpec(max_tokens_per_mb=70, granularity=2),
    ],
)
@pytest.mark.parametrize("align", [1, 8])
def test_each_adapter_has_the_micro_batches_that_it_has_alone(spec: MicroBatchSpec, align: int) -> None:
    """In the same order, each in one run. So its gradient is the same sum, to the bit."""
    order = (2, 2, 0, 0, 1, 1, 2, 2, 0, 0) if spec.granularity == 2 else ADAPTERS
    samples = samples_of(LENGTHS, order)
    plan = plan_batch(samples, spec, align=align)
    assert plan.adapters == order
    for k in range(3):
        mine = [i for i, named in enumerate(order) if named == k]
        alone = plan_batch([samples[i] for i in mine], spec, align=align)
        mixed = [tuple(i for i in members if order[i] == k) for members in plan.bins]
        assert [members for members in mixed if members] == [tuple(mine[i] for i in members) for members in alone.bins]
    # Runs are in the order of the adapters, and the budget is kept.
    for members in plan.bins:
        named = [order[i] for i in members]
        assert named == sorted(named)
        if spec.max_tokens_per_mb and len(members) > spec.granularity:
            assert -(-sum(LENGTHS[i] for i in members) // align) * align <= spec.max_tokens_per_mb
    mbs = plan.build(n_mbs=plan.n_mbs + 1, device=torch.device("cpu"), adapters=NAMES)
    assert mbs.adapters == NAMES
    for mb in mbs.real:
        assert mb.adapters == tuple(NAMES[order[i]] for i in mb.sample_ids)
    assert mbs[-1].filler
    assert mbs[-1].adapters == ("first",)


def test_few_samples_of_each_adapter_make_the_least_number_of_micro_batches() -> None:
    samples = samples_of((5, 6, 7), (0, 1, 2))
    assert plan_batch(samples, MicroBatchSpec(n_mbs=3)).n_mbs == 3
    assert plan_batch(samples, MicroBatchSpec()).n_mbs == 1


def test_small_requests_are_merged_and_large_ones_are_not() -> None:
    spec = MicroBatchSpec(max_tokens_per_mb=100)
    assert plan_batch(samples_of((45, 45, 45, 45), (0, 1, 2, 1)), spec).bins == ((0, 2), (1, 3))
    assert plan_batch(samples_of((45, 45, 45), (0, 1, 2)), spec).bins == ((0, 1), (2,))
    assert plan_batch(samples_of((90, 90, 90), (0, 1, 2)), spec).n_mbs == 3


def test_samples_of_a_unit_have_one_adapter() -> None:
    with pytest.raises(ValueError, match=r"samples 2 to 3 name different adapters, but MicroBatchSpec.granularity = 2"):
        plan_batch(samples_of((5, 6, 7, 8), (1, 1, 0, 1)), MicroBatchSpec(granularity=2))


def test_samples_of_different_adapters_share_no_prefix() -> None:
    ids = torch.arange(20)
    batch = [{"input_ids": ids, "adapter": torch.tensor(k)} for k in (1, 0, 1, 0)]
    plan = plan_batch(batch, MicroBatchSpec(share_prefixes=True))
    assert [len(tree) for tree in plan.trees if tree is not None] == [40]
    # Coordinates get the samples of one adapter each, which share their prefix.
    shards = plan_shards(batch, MicroBatchSpec(share_prefixes=True), 2).shards
    assert sorted(sorted(int(sample["adapter"]) for sample in shard) for shard in shards) == [[0, 0], [1, 1]]


# ---- runs of rows

PACKED: dict[str, Any] = {"cp": ContextParallel(None), "rows": False}


def test_runs_cover_padding_and_unwanted_rows() -> None:
    wanted = torch.tensor([True, False, False, False, True, True])
    layout = StreamLayout.of((2, 1, 3), 8, None, wanted, ("a", "a", "b"), **PACKED)
    assert layout.adapters is not None
    assert layout.adapters.layers == (("a", 3), ("b", 5))
    assert layout.adapters.wanted == (("a", 1), ("b", 2))
    assert StreamLayout.of((2, 1, 3), 8, None, wanted, **PACKED).adapters is None
    grid = StreamLayout.of((2, 1, 3), 6, None, None, ("a", "a", "b"), cp=ContextParallel(None), rows=True).adapters
    assert grid is not None
    assert (grid.layers, grid.outputs) == ((("a", 6), ("b", 3)), (("a", 3), ("b", 3)))


def test_slices_of_runs_are_those_of_each_rank() -> None:
    runs = AdapterRuns((("a", 3), ("b", 4), ("c", 1)), (), ())
    assert list(runs.slices(8, 1)) == [("a", slice(0, 3)), ("b", slice(3, 7)), ("c", slice(7, 8))]
    assert list(runs.slices(4, 0)) == [("a", slice(0, 3)), ("b", slice(3, 4))]
    assert list(runs.slices(4, 1)) == [("b", slice(0, 3)), ("c", slice(3, 4))]
    with pytest.raises(
        ValueError, match="computes 3 rows of 8 tokens: samples of one call cannot name several adapters"
    ):
        list(runs.slices(3, 0))


def test_samples_alone_stay_alone_if_more_micro_batches_are_wanted() -> None:
    spec = MicroBatchSpec(max_tokens_per_mb=10, n_mbs=3, overlong="alone")
    plan = plan_batch(samples_of((20, 3, 3), (0, 1, 2)), spec)
    assert sorted(plan.bins) == [(0,), (1,), (2,)]
