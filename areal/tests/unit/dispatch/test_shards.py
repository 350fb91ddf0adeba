"""Shards: partitions of a batch that are balanced and keep units together, and results in the caller's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api import MicroBatchSpec, StepOutput, TopKOutput
from areal.dispatch.shards import ATTENTION, ShardPlan, plan_shards
from areal.dispatch.wire import pack_tensors, unpack_tensors
from areal.tests.unit.data.bad_batches import BAD_BATCHES, VOCAB
from areal.utils.data import plan_batch, read_batch, sequence_cost
from areal.utils.data.prefixes import Prefixes

SPEC = {"per_sequence": ("features",), "payloads": ("image",)}
FORMS = ("list", "padded")
TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
"""Draw from few token ids, so that many samples share a prefix."""


def batch_of(samples: Sequence[Sequence[int]], form: str) -> Any:
    """Return a batch with every kind of key. ``number`` and ``place`` identify samples and tokens."""
    meta, rows = {"step": 3, "names": ["a", "b"]}, []
    for i, ids in enumerate(samples):
        rows.append(
            {
                "input_ids": torch.tensor(ids),
                "place": 100.0 * i + torch.arange(len(ids), dtype=torch.float64),
                "number": torch.tensor(i),
                "features": torch.full((2, 3), float(i)),
                "image": torch.full((i % 3, 2), float(i)),
                "meta": meta,
            }
        )
    if form == "list":
        return rows
    lengths = torch.tensor([len(ids) for ids in samples])
    width = int(lengths.max()) + 1
    batch: dict[str, Any] = {"attention_mask": (torch.arange(width) < lengths[:, None]).long(), "meta": meta}
    for key in ("input_ids", "place"):
        batch[key] = torch.stack([torch.cat([row[key], row[key].new_ones(width - len(row[key]))]) for row in rows])
    batch |= {key: torch.stack([row[key] for row in rows]) for key in ("number", "features")}
    return batch | {"image": [row["image"] for row in rows]}


def like_an_engine(shard: Any) -> Any:
    """Return what ``forward_batch`` would: per-token outputs of one shard, plain and in a named tuple."""
    if isinstance(shard, list):
        places = [sample["place"] for sample in shard]
        return {
            "logprobs": places,
            "topk": TopKOutput([torch.stack([x, -x], -1) for x in places], [x.long() for x in places]),
        }
    places = shard["place"] * shard["attention_mask"]
    return {"logprobs": places, "topk": TopKOutput(torch.stack([places, -places], -1), places.long())}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


# ---- the division


@settings(max_examples=150, deadline=None, report_multiple_bugs=False)
@given(TOKENS, st.integers(2, 5), st.sampled_from([1, 1, 2, 3]), st.booleans(), st.sampled_from(FORMS))
def test_every_sample_is_in_one_shard_and_units_stay_together(
    samples: list[list[int]], n: int, size: int, sharing: bool, form: str
) -> None:
    samples = samples * size
    batch, spec = batch_of(samples, form), MicroBatchSpec(granularity=size, share_prefixes=sharing, **SPEC)
    plan = plan_shards(batch, spec, n)
    assert plan.form == read_batch(batch, spec).form
    assert len(plan.indices) == len(plan.shards) == n
    assert sorted(i for members in plan.indices for i in members) == list(range(len(samples)))
    for members, shard in zip(plan.indices, plan.shards, strict=True):
        assert list(members) == sorted(members)
        # Units are consecutive and aligned, in the batch and in the shard.
        for k in range(0, len(members), size):
            assert members[k] % size == 0
            assert members[k : k + size] == tuple(range(members[k], members[k] + size))
        # The shard has the samples of these indices, and nothing else.
        if form == "list":
            assert isinstance(shard, list)
            assert [id(sample) for sample in shard] == [id(batch[i]) for i in members]
        else:
            assert shard["input_ids"].shape == (len(members), batch["input_ids"].shape[1])
            assert all(equal(shard[key], batch[key][list(members)]) for key in batch if key not in ("image", "meta"))
            assert [id(x) for x in shard["image"]] == [id(batch["image"][i]) for i in members]
            assert shard["meta"] is batch["meta"]
        # An engine reads the shard.
        assert read_batch(shard, spec).form.seqlens == tuple(plan.form.seqlens[i] for i in members)
    if not sharing:
        assert sum(not members for members in plan.indices) == max(0, n - len(samples) // size)
    assert plan_shards(batch, spec, n).indices == plan.indices


def shard_cost(samples: Sequence[Sequence[int]], members: Sequence[int], sharing: bool) -> float:
    """Compute the cost of a shard by its definition: every token of the prefix tree once."""
    if not sharing:
        return sum(sequence_cost(len(samples[i]), ATTENTION) for i in members)
    beginnings = {tuple(samples[i][: k + 1]) for i in members for k in range(len(samples[i]))}
    return sum(sequence_cost(len(each), ATTENTION) - sequence_cost(len(each) - 1, ATTENTION) for each in beginnings)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(2, 3), st.sampled_from([1, 2]))
def test_largest_cost_is_at_most_four_thirds_of_the_best(lengths: list[int], n: int, size: int) -> None:
    samples = [[1] * length for length in lengths for _ in range(size)]
    plan = plan_shards(batch_of(samples, "list"), MicroBatchSpec(granularity=size, **SPEC), n)
    units = [size * sequence_cost(length, ATTENTION) for length in lengths]
    best = min(
        max(sum(c for c, r in zip(units, ranks, strict=True) if r == rank) for rank in range(n))
        for ranks in product(range(n), repeat=len(units))
    )
    assert max(shard_cost(samples, members, False) for members in plan.indices) <= 4 / 3 * best + 1e-9


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(2, 3))
def test_largest_cost_with_shared_prefixes_is_near_the_best(samples: list[list[int]], n: int) -> None:
    plan = plan_shards(batch_of(samples, "list"), MicroBatchSpec(share_prefixes=True, **SPEC), n)

    def largest(division: Sequence[Sequence[int]]) -> float:
        return max(shard_cost(samples, members, True) for members in division)

    best = min(
        largest([[i for i, r in enumerate(ranks) if r == rank] for rank in range(n)])
        for ranks in product(range(n), repeat=len(samples))
    )
    # Families that cost less than a balanced shard are not divided: one may be too much for a coordinate.
    balanced = shard_cost(samples, range(len(samples)), True) / n
    longest = max(sequence_cost(len(ids), ATTENTION) for ids in samples)
    assert largest(plan.indices) <= 4 / 3 * best + max(balanced, longest) + 1e-9


def prompts(count: int, tokens: int) -> list[list[int]]:
    return torch.randint(0, 1000, (count, tokens), generator=torch.Generator().manual_seed(0)).tolist()


def groups_by_coordinate(plan: ShardPlan, group_of: Sequence[int]) -> list[list[int]]:
    return [sorted({group_of[i] for i in members}) for members in plan.indices]


@pytest.mark.parametrize("system", [[], list(range(20))])
def test_samples_of_a_prompt_stay_together(system: list[int]) -> None:
    """Sixteen shuffled groups of eight on four coordinates: four groups on each, also if all begin with one system prompt."""
    group_of = [i % 16 for i in range(128)]
    samples = [[*system, *prompts(16, 50)[group], *[1000 + i] * 10] for i, group in enumerate(group_of)]
    plan = plan_shards(batch_of(samples, "list"), MicroBatchSpec(share_prefixes=True, **SPEC), 4)
    groups = groups_by_coordinate(plan, group_of)
    assert [len(each) for each in groups] == [4] * 4
    assert sorted(group for each in groups for group in each) == list(range(16))


def test_a_prompt_with_more_than_a_balanced_shard_is_divided_evenly() -> None:
    samples = [[*prompts(1, 50)[0], *[1000 + i] * 10] for i in range(64)]
    plan = plan_shards(batch_of(samples, "padded"), MicroBatchSpec(share_prefixes=True, **SPEC), 4)
    assert [len(members) for members in plan.indices] == [16] * 4
    # Among small groups, the large one is on as few coordinates as balance allows, and no small one is divided.
    group_of = [0] * 24 + [1 + i // 4 for i in range(16)]
    samples = [[*prompts(5, 40)[group], *[1000 + i] * 10] for i, group in enumerate(group_of)]
    plan = plan_shards(batch_of(samples, "padded"), MicroBatchSpec(share_prefixes=True, **SPEC), 4)
    groups = groups_by_coordinate(plan, group_of)
    assert [sum(group in each for each in groups) for group in range(1, 5)] == [1] * 4
    costs = [shard_cost(samples, members, True) for members in plan.indices]
    assert max(costs) <= 1.2 * min(costs)


def test_preference_pairs_of_a_prompt_share_as_their_micro_batches_do() -> None:
    """Units of two samples are compared by their first in lexicographic order."""
    group_of = [i // 2 % 6 for i in range(24)]
    samples = [[*prompts(6, 30)[group], *[1000 + i] * (i % 4 + 1)] for i, group in enumerate(group_of)]
    plan = plan_shards(batch_of(samples, "list"), MicroBatchSpec(share_prefixes=True, granularity=2, **SPEC), 3)
    assert [len(each) for each in groups_by_coordinate(plan, group_of)] == [2] * 3


def test_replayed_experts_are_part_of_a_prefix() -> None:
    """Equal tokens with different experts are not shared, and need not stay together."""
    samples = [{"input_ids": torch.arange(30), "routed_experts": torch.full((30, 2, 1), i % 2)} for i in range(4)]
    plan = plan_shards(samples, MicroBatchSpec(share_prefixes=True), 2)
    assert plan.indices == ((0, 2), (1, 3))


@pytest.mark.parametrize("sharing", [False, True])
def test_equal_samples_are_dealt_in_their_order(sharing: bool) -> None:
    different = batch_of([[i, 5, 6] for i in range(10, 16)], "list")
    assert plan_shards(different, MicroBatchSpec(share_prefixes=sharing, **SPEC), 3).indices == ((0, 3), (1, 4), (2, 5))
    same = batch_of([[4, 5, 6]] * 3, "list")
    divided = plan_shards(same, MicroBatchSpec(share_prefixes=sharing, **SPEC), 2).indices
    assert divided == (((0, 1, 2), ()) if sharing else ((0, 2), (1,)))


def test_samples_that_engines_drop_do_not_count_as_work() -> None:
    lengths = (30, 4, 30, 4, 5, 5, 30)
    spec = MicroBatchSpec(max_tokens_per_mb=10, overlong="drop", **SPEC)
    plan = plan_shards(batch_of([[1] * n for n in lengths], "list"), spec, 2)
    work = [sum(lengths[i] for i in members if lengths[i] < 30) for members in plan.indices]
    assert work == [9, 9]
    assert [sum(lengths[i] == 30 for i in members) for members in plan.indices] == [2, 1]


# ---- results


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.integers(1, 5), st.sampled_from([1, 2]), st.booleans(), st.sampled_from(FORMS))
def test_merged_results_of_shards_are_the_result_of_the_batch(
    samples: list[list[int]], n: int, size: int, sharing: bool, form: str
) -> None:
    batch = batch_of(samples * size, form)
    plan = plan_shards(batch, MicroBatchSpec(granularity=size, share_prefixes=sharing, **SPEC), n)
    assert equal(plan.merge([like_an_engine(shard) for shard in plan.shards]), like_an_engine(batch))


def test_values_of_any_type_are_merged_by_sample() -> None:
    batch = batch_of([[1] * n for n in (3, 9, 2, 5, 4)], "list")
    plan = plan_shards(batch, MicroBatchSpec(**SPEC), 3)

    def fn(shard: Any) -> Any:
        numbers = [sample["number"] for sample in shard]
        return {
            "texts": [f"sample {i}" for i in numbers],
            "pairs": ([{"n": i} for i in numbers], torch.tensor(numbers) * 2),
        }

    assert equal(plan.merge([fn(shard) for shard in plan.shards]), fn(batch))


@pytest.mark.parametrize("form", FORMS)
def test_merged_step_has_the_outputs_of_all_shards(form: str) -> None:
    batch = batch_of([[1] * n for n in (3, 9, 2, 5, 4)], form)
    for n in (1, 3, 8):
        plan = plan_shards(batch, MicroBatchSpec(**SPEC), n)
        step = StepOutput(loss=2.0, terms={"loss": 2.0})
        merged = plan.merge_steps([(step, like_an_engine(shard)) for shard in plan.shards])
        assert (merged.loss, merged.terms) == (step.loss, step.terms)
        assert equal(merged.outputs, like_an_engine(batch))
        assert plan.merge_steps([(step, {}) for _ in plan.shards]) == step


def test_a_coordinate_without_samples_adds_nothing() -> None:
    for form in FORMS:
        batch = batch_of([[1, 2], [3]], form)
        plan = plan_shards(batch, MicroBatchSpec(**SPEC), 4)
        assert plan.indices == ((0,), (1,), (), ())
        results = [like_an_engine(shard) for shard in plan.shards]
        # Its result is not read: a function may return anything for no samples.
        for nothing in (results[3], None, [torch.ones(2)]):
            assert equal(plan.merge([*results[:3], nothing]), like_an_engine(batch))


@pytest.mark.parametrize("form", FORMS)
def test_merged_results_are_on_the_device_of_the_batch(form: str) -> None:
    """Without a GPU, on torch's device without memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    plan = plan_shards(batch_of([[1, 2], [3], [4]], form), MicroBatchSpec(**SPEC), 2)
    assert plan.divided is not None
    plan = replace(plan, divided=(replace(plan.divided[0], device=device), plan.divided[1]))
    merged = plan.merge([like_an_engine(shard) for shard in plan.shards])
    assert {x.device.type for x in pytree.tree_leaves(merged)} == {device.type}
    values = plan.merge([[{"x": torch.ones(2)} for _ in members] for members in plan.indices])
    assert {value["x"].device.type for value in values} == {device.type}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_on_a_gpu_is_sent_through_host_memory(form: str) -> None:
    on_host = batch_of([[1, 2], [3], [4]], form)
    batch = pytree.tree_map_only(Tensor, lambda x: x.cuda(), on_host)
    plan = plan_shards(batch, MicroBatchSpec(**SPEC), 2)
    shards = [unpack_tensors(pack_tensors(shard)) for shard in plan.shards]
    assert equal(shards, list(plan_shards(on_host, MicroBatchSpec(**SPEC), 2).shards))
    assert equal(plan.merge([like_an_engine(shard) for shard in shards]), like_an_engine(batch))


def test_one_coordinate_gets_the_batch_itself() -> None:
    for form in FORMS:
        batch = batch_of([[1, 2], [3]], form)
        plan = plan_shards(batch, MicroBatchSpec(**SPEC), 1)
        assert len(plan.shards) == 1
        assert plan.shards[0] is batch
        assert equal(plan.merge([like_an_engine(batch)]), like_an_engine(batch))
        assert (plan.form.kind, plan.form.seqlens) == (form, (2, 1))
        assert plan.indices == ((0, 1),)


def test_batch_that_only_the_engine_checks_is_passed_on() -> None:
    for batch in (batch_of([[1, 2], [3]], "padded"), 7, [{"labels": 1}]):
        plan, result = ShardPlan((batch,), MicroBatchSpec(**SPEC)), object()
        assert plan.merge([result]) is result
    plan = ShardPlan((batch_of([[1, 2], [3]], "padded"),), MicroBatchSpec(**SPEC))
    assert (plan.form.kind, plan.form.seqlens, plan.form.width) == ("padded", (2, 1), 3)
    assert plan.indices == ((0, 1),)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([[1, 2], [3]], r"merge got 2 results for 3 coordinates"),
        ([[1, 2], [3], [4]], r"the result of coordinate 1 has 1 values for 2 samples: return one for each"),
        (
            [{"a": [1, 2]}, {"b": [3, 4]}, {}],
            r"the result is a dict with the keys \['a'\] on coordinate 0 and a dict with the keys \['b'\]",
        ),
        ([[1, 2], torch.zeros(2), []], "the result is a list on coordinate 0 and a Tensor on coordinate 1"),
        ([{"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 4)}, {}], r"the result\['a'\] has rows of .*\(3,\).*\(4,\)"),
        ([torch.zeros(2), torch.zeros(2).long(), []], r"has rows of .*float32.*int64"),
        ([torch.zeros(()), torch.zeros(()), []], "has 0 values for 2 samples"),
        ([1.5, 2.5, None], "the result is a float: return a list with a value for each sample"),
        ([([1, 2],), ([1, 2], [3, 4]), ()], r"the result has \[1, 2\] items on coordinates \[0, 1\]"),
    ],
)
def test_results_that_cannot_be_merged_raise(results: list[Any], message: str) -> None:
    batch = batch_of([[1]] * 4, "list")
    plan = plan_shards(batch, MicroBatchSpec(granularity=2, **SPEC), 3)
    assert plan.indices == ((0, 1), (2, 3), ())
    with pytest.raises(ValueError, match=message):
        plan.merge(results)


# ---- errors


@pytest.mark.parametrize(("batch", "spec"), [bad[1:3] for bad in BAD_BATCHES], ids=[bad[0] for bad in BAD_BATCHES])
def test_a_bad_batch_raises_the_error_of_an_engine(batch: Any, spec: dict[str, Any]) -> None:
    check = partial(plan_batch, spec=MicroBatchSpec(**spec), vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"\w") as engines:
        check(batch)
    for n in (1, 2, 4):
        with pytest.raises(ValueError, match=r"\w") as drivers:
            plan_shards(batch, MicroBatchSpec(), n, check=check)
        assert str(drivers.value) == str(engines.value)


def test_a_batch_without_samples_raises_the_error_of_an_engine() -> None:
    for nothing, n in product(([], {"input_ids": torch.zeros(0, 3).long()}), (1, 2)):
        with pytest.raises(ValueError, match="empty batch: no rank has a sample"):
            plan_shards(nothing, MicroBatchSpec(), n)
    spec = MicroBatchSpec(max_tokens_per_mb=2, overlong="drop", **SPEC)
    with pytest.raises(ValueError, match="empty batch: all 2 sequences of the global batch were dropped"):
        plan_shards(batch_of([[1] * 3, [2] * 4], "list"), spec, 2)


@pytest.mark.parametrize(("rows", "lengths"), [(3, (3, 5, 7, 9)), (4, (3, 5, 7, 9))])
def test_a_key_that_a_shard_would_read_differently_raises(rows: int, lengths: tuple[int, ...]) -> None:
    """In the batch the shape is that of every sample; alone in a shard, a sample may have as many tokens as the key has rows."""
    batch = [{"input_ids": torch.ones(n, dtype=torch.int64), "bonus": torch.ones(rows)} for n in lengths]
    assert "bonus" in read_batch(batch, MicroBatchSpec()).sequences
    plan_shards(batch, MicroBatchSpec(), 2)
    with pytest.raises(
        ValueError, match=rf"key 'bonus' is ambiguous: it has {rows} rows, .* name it in MicroBatchSpec.per_sequence"
    ):
        plan_shards(batch, MicroBatchSpec(), 4)
    named = MicroBatchSpec(per_sequence=("bonus",))
    assert all("bonus" in read_batch(shard, named).sequences for shard in plan_shards(batch, named, 4).shards)


# ---- prefixes of long batches


def test_shared_cost_counts_every_prefix_once() -> None:
    """The definition that the tests above use is that of the packing."""
    samples = [[1, 2, 3], [1, 2, 4, 4], [1, 2, 3], [5]]
    prefixes = Prefixes({"input_ids": [torch.tensor(ids) for ids in samples]})
    ordered = prefixes.sort(range(4))
    costs = [sequence_cost(len(samples[i]), ATTENTION) for i in ordered]
    links = [sequence_cost(prefixes.shared(a, b), ATTENTION) for a, b in pairwise(ordered)]
    assert shard_cost(samples, range(4), True) == pytest.approx(sum(costs) - sum(links))
