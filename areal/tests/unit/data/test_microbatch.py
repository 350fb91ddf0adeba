"""Conversion of batches to micro-batches and back, and errors of malformed batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.api import IGNORE_INDEX, MicroBatchList, MicroBatchSpec
from areal.tests.harness.lines import lines_of
from areal.utils.data import BatchPlan, plan_batch, round_up

CPU = torch.device("cpu")
VOCAB = 50


def samples_of(lengths: list[int], *, k: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Return a list batch with every kind of key."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for i, n in enumerate(lengths):
        sample: dict[str, Any] = {
            "input_ids": torch.randint(VOCAB, (n,), generator=g),
            "loss_mask": torch.randint(2, (n,), generator=g).bool(),
            "advantages": torch.rand(n, generator=g),
            "hidden": torch.rand(n, 2, 3, generator=g),
            "reward": torch.rand((), generator=g),
            "features": torch.rand(70, 2, generator=g),
            "image": torch.rand(i % 3, 4, generator=g),
        }
        if k:
            sample["target_ids"] = torch.randint(VOCAB, (n, k), generator=g).masked_fill(
                torch.rand(n, k, generator=g) < 0.3, IGNORE_INDEX
            )
        out.append(sample)
    return out


def padded(samples: list[dict[str, Any]], width: int, junk: int = -7) -> dict[str, Any]:
    """Return the same samples as a padded dict, with random values in the padding that must not affect anything."""
    n = len(samples)
    batch: dict[str, Any] = {"attention_mask": torch.zeros(n, width, dtype=torch.int64)}
    for key, first in samples[0].items():
        column = [sample[key] for sample in samples]
        if key == "image":
            batch[key] = column
        elif key in ("reward", "features"):
            batch[key] = torch.stack(column)
        else:
            batch[key] = torch.full((n, width, *first.shape[1:]), junk).to(first.dtype)
            for i, x in enumerate(column):
                batch[key][i, : len(x)] = x
    for i, sample in enumerate(samples):
        batch["attention_mask"][i, : len(sample["input_ids"])] = 1
    return batch


def build(plan: BatchPlan, n_mbs: int | None = None, padded_length: int | None = None) -> MicroBatchList:
    return plan.build(n_mbs=n_mbs or max(1, plan.n_mbs), device=CPU, padded_length=padded_length)


CASES = st.fixed_dictionaries(
    {
        "groups": st.lists(st.integers(1, 12), min_size=1, max_size=8),
        "granularity": st.integers(1, 3),
        "budget": st.none() | st.integers(8, 40),
        "n_mbs": st.none() | st.integers(1, 5),
        "align": st.integers(1, 8),
        "overlong": st.sampled_from(["alone", "drop"]),
        "as_list": st.booleans(),
        "k": st.integers(0, 3),
        "fillers": st.integers(0, 2),
    }
)


@settings(max_examples=150, deadline=None)
@given(CASES)
def test_restore_inverts_packing_for_every_kind_of_key(case: dict[str, Any]) -> None:
    lengths = [1 + (n + j * 5) % 12 for n in case["groups"] for j in range(case["granularity"])]
    samples = samples_of(lengths, k=case["k"])
    width = max(lengths) + 2
    batch = samples if case["as_list"] else padded(samples, width)
    before, untouched = copy.deepcopy(batch), copy.copy(batch)
    spec = MicroBatchSpec(
        max_tokens_per_mb=case["budget"],
        n_mbs=case["n_mbs"],
        granularity=case["granularity"],
        overlong=case["overlong"],
        payloads=("image",),
    )
    plan = plan_batch(batch, spec, align=case["align"], vocab_size=VOCAB)
    mbs = build(plan, max(1, plan.n_mbs + case["fillers"]))
    _check_layout(mbs, plan, lengths, case)
    if mbs.real:
        _check_values(mbs, samples, None if case["as_list"] else width)
    _assert_same(batch, before)
    assert all(batch[key] is untouched[key] for key in batch) if isinstance(batch, dict) else batch == untouched


def _check_layout(mbs: MicroBatchList, plan: BatchPlan, lengths: list[int], case: dict[str, Any]) -> None:
    taken = [i for mb in mbs.real for i in mb.sample_ids]
    assert sorted(taken + list(mbs.dropped)) == list(range(len(lengths)))
    assert [mb.index for mb in mbs] == list(range(len(mbs)))
    assert [mb.filler for mb in mbs] == [False] * plan.n_mbs + [True] * (len(mbs) - plan.n_mbs)
    assert plan.n_tokens == mbs.n_tokens == sum(lengths[i] for i in taken)
    size, budget = case["granularity"], case["budget"]
    for mb in mbs.real:
        assert mb.seqlens == tuple(lengths[i] for i in mb.sample_ids)
        assert mb.cu_seqlens.dtype == torch.int32
        assert mb.cu_seqlens.diff().tolist() == list(mb.seqlens)
        assert mb.padded_length == round_up(mb.n_tokens, case["align"]) <= plan.padded_length
        groups = {i // size for i in mb.sample_ids}
        assert sorted(mb.sample_ids) == [i for g in sorted(groups) for i in range(g * size, (g + 1) * size)]
        if budget is not None and mb.padded_length > budget:
            assert case["overlong"] == "alone"
            assert len(groups) == 1
    assert not mbs.dropped or case["overlong"] == "drop"
    if case["n_mbs"] and not mbs.dropped:
        assert plan.n_mbs >= min(case["n_mbs"], len(lengths) // size)


def _check_values(mbs: MicroBatchList, samples: list[dict[str, Any]], width: int | None) -> None:
    keys = ("input_ids", "advantages", "hidden", "reward", "features")
    if all(mb.n_tokens == len(mb.seqlens) for mb in mbs.real):
        # With one-token sequences, restore cannot tell [n] from [T] and treats all results as per token.
        keys = keys[:3]
    restored = mbs.restore([{key: mb.data[key] for key in keys} for mb in mbs.real])
    for key in keys:
        for i, sample in enumerate(samples):
            got = restored[key][i]
            expected = torch.zeros_like(sample[key]) if i in mbs.dropped else sample[key]
            if width is not None and key in ("input_ids", "advantages", "hidden"):
                assert got.shape[0] == width
                assert not got[len(expected) :].any()
                got = got[: len(expected)]
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
    for mb in mbs.real:
        assert "attention_mask" not in mb.data
        for nth, (start, n, i) in enumerate(zip(mb.cu_seqlens.tolist(), mb.seqlens, mb.sample_ids, strict=False)):
            sample = samples[i]
            expected = sample.get("target_ids", torch.tensor([*sample["input_ids"].tolist()[1:], IGNORE_INDEX]))
            assert torch.equal(mb.data["target_ids"][start : start + n], expected)
            has = expected >= 0 if expected.dim() == 1 else (expected >= 0).any(1)
            assert torch.equal(mb.data["loss_mask"][start : start + n], sample["loss_mask"] & has)
            assert torch.equal(mb.data["image"][nth], sample["image"])


def _assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _assert_same(x, y)
    else:
        assert a == b


def test_padded_and_list_batches_give_equal_micro_batches() -> None:
    samples = samples_of([5, 1, 9, 4, 7])
    spec = MicroBatchSpec(max_tokens_per_mb=12, payloads=("image",))
    lists, dicts = build(plan_batch(samples, spec)), build(plan_batch(padded(samples, 9), spec))
    for a, b in zip(lists, dicts, strict=True):
        assert a.sample_ids == b.sample_ids
        _assert_same(dict(a.data), dict(b.data))


def test_filler_micro_batch_has_one_token_and_no_weight() -> None:
    batch = {
        **padded(samples_of([4, 6], k=2), 6),
        "temperature": torch.tensor([0.5, 2.0]),
        "meta": {"beta": 0.1},
    }
    mbs = build(plan_batch(batch, MicroBatchSpec(payloads=("image",)), align=4), 3, padded_length=16)
    real, filler = mbs[0], mbs[2]
    assert filler.data.keys() == real.data.keys()
    assert filler.filler
    assert filler.sample_ids == ()
    assert filler.seqlens == (1,)
    assert filler.padded_length == real.padded_length == 16
    assert filler.cu_seqlens.tolist() == [0, 1]
    for key, value in real.data.items():
        if isinstance(value, Tensor) and key != "cu_seqlens":
            assert filler.data[key].dtype == value.dtype
            assert filler.data[key].shape == (1, *value.shape[1:])
    assert filler.data["target_ids"].tolist() == [[IGNORE_INDEX] * 2]
    assert not filler.data["loss_mask"].any()
    assert filler.data["temperature"].tolist() == [1.0]  # a temperature of zero would divide logits by zero
    assert filler.data.meta == {"beta": 0.1}
    assert build(plan_batch(batch, MicroBatchSpec(payloads=("image",)), align=4), 2)[1].padded_length == 4


def test_rank_with_only_dropped_samples_gets_fillers() -> None:
    spec = MicroBatchSpec(max_tokens_per_mb=4, overlong="drop", payloads=("image",))
    plan = plan_batch(samples_of([6, 5]), spec, align=2, vocab_size=VOCAB)
    mbs = build(plan, 2)
    assert (plan.n_mbs, plan.n_tokens, plan.padded_length, plan.dropped) == (0, 0, 2, (0, 1))
    assert [mb.filler for mb in mbs] == [True, True]
    assert mbs.real == ()
    assert mbs[0].data["hidden"].shape == (1, 2, 3)


def test_default_targets_do_not_cross_sequences() -> None:
    batch = [{"input_ids": torch.tensor(ids)} for ids in ([1, 2, 3], [4], [5, 6])]
    mbs = build(plan_batch(batch, MicroBatchSpec()))
    assert mbs[0].data["target_ids"].tolist() == [2, 3, -100, -100, 6, -100]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_loss_mask_is_zero_without_a_target_in_any_dtype(dtype: torch.dtype) -> None:
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "loss_mask": torch.ones(1, 3, dtype=dtype)}
    data = build(plan_batch(batch, MicroBatchSpec()))[0].data
    assert data["loss_mask"].dtype == dtype
    assert data["loss_mask"].tolist() == [1, 1, 0]
    batch["loss_mask"] = torch.tensor([[1.0, 1.0, float("nan")]])
    assert build(plan_batch(batch, MicroBatchSpec()))[0].data["loss_mask"].tolist() == [1, 1, 0]


def test_mask_of_k_targets_is_applied_per_target() -> None:
    targets = torch.tensor([[[1, IGNORE_INDEX], [IGNORE_INDEX, IGNORE_INDEX]]])
    batch = {"input_ids": torch.tensor([[1, 2]]), "target_ids": targets, "loss_mask": torch.ones(1, 2, 2)}
    assert build(plan_batch(batch, MicroBatchSpec()))[0].data["loss_mask"].tolist() == [[1, 0], [0, 0]]


def test_ids_become_int64_and_inputs_are_detached() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2]], dtype=torch.int32),
        "target_ids": torch.tensor([[2, 3]], dtype=torch.int32),
        "logprobs": torch.rand(1, 2, requires_grad=True),
    }
    data = build(plan_batch(batch, MicroBatchSpec()))[0].data
    assert data["input_ids"].dtype == data["target_ids"].dtype == torch.int64
    assert not data["logprobs"].requires_grad


def test_per_sequence_option_overrides_shape_inference() -> None:
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "embedding": torch.rand(2, 3), "other": torch.rand(2, 4)}
    spec = MicroBatchSpec(per_sequence=("embedding", "other", "not there"))
    data = build(plan_batch(batch, spec))[0].data
    assert torch.equal(data["embedding"], batch["embedding"])
    assert torch.equal(data["other"], batch["other"])
    samples = [{key: value[i] for key, value in batch.items()} for i in range(2)]
    assert build(plan_batch(samples, spec))[0].data["embedding"].shape == (2, 3)
    assert build(plan_batch({**batch, "other": torch.rand(2, 9)}, MicroBatchSpec()))[0].data["embedding"].shape == (6,)


def test_batch_of_one_token_sequences() -> None:
    batch = {"input_ids": torch.tensor([[1], [2]]), "advantages": torch.rand(2, 1), "reward": torch.rand(2)}
    mbs = build(plan_batch(batch, MicroBatchSpec(n_mbs=2)))
    assert [mb.data["advantages"].shape for mb in mbs] == [(1,), (1,)]
    assert torch.equal(mbs.restore([mb.data["reward"] for mb in mbs]), batch["reward"][:, None])


def test_meta_is_passed_unchanged_to_every_micro_batch() -> None:
    meta = {"names": ["a", "b"], "beta": 0.1}
    dicts = plan_batch({"input_ids": torch.ones(2, 3, dtype=torch.int64), "meta": meta}, MicroBatchSpec(n_mbs=2))
    assert [mb.data["meta"]["names"] is meta["names"] for mb in build(dicts, 3)] == [True] * 3
    lists = [{"input_ids": torch.ones(3, dtype=torch.int64), "meta": {"beta": 0.1}} for _ in range(2)]
    assert build(plan_batch(lists, MicroBatchSpec()))[0].data.meta == {"beta": 0.1}


def test_digest_differs_between_batches() -> None:
    spec = MicroBatchSpec(max_tokens_per_mb=12, payloads=("image",))
    samples = samples_of([5, 5, 3, 9])
    samples[2]["image"] = torch.zeros(2, 4)

    def digest(change: Callable[[list[dict[str, Any]]], object] = lambda s: None) -> int:
        changed = copy.deepcopy(samples)
        change(changed)
        return plan_batch(changed, spec).digest()

    same = digest()
    assert same == digest() == plan_batch(samples, spec).digest()
    assert 0 <= same < 2**63
    assert plan_batch(padded(samples, 9), spec).digest() == plan_batch(padded(samples, 9, junk=-3), spec).digest()
    others = [
        digest(lambda s: s[0]["advantages"].__setitem__(2, 9.0)),
        digest(lambda s: s[0]["loss_mask"].logical_not_()),
        digest(lambda s: s[3]["reward"].fill_(2.0)),
        digest(lambda s: s[2]["image"].fill_(1e-30)),
        digest(lambda s: s.insert(0, s.pop(1))),
        digest(lambda s: s.insert(0, s.pop(2))),
        digest(lambda s: s.reverse()),
        digest(lambda s: [x.update(extra=x.pop("advantages")) for x in s]),
        digest(lambda s: [x.update(advantages=x["advantages"].double()) for x in s]),
        digest(lambda s: s.pop()),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_digest_depends_on_sequence_boundaries() -> None:
    ids, targets = torch.arange(5), torch.arange(5) + 1
    a, b = (
        [{"input_ids": x, "target_ids": y} for x, y in zip(ids.split(cut), targets.split(cut), strict=True)]
        for cut in ([3, 2], [2, 3])
    )
    assert plan_batch(a, MicroBatchSpec()).digest() != plan_batch(b, MicroBatchSpec()).digest()


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, -1.0, 0.5]), min_size=6, max_size=6), st.permutations(range(6)))
def test_digest_depends_on_order_of_float_values(values: list[float], order: list[int]) -> None:
    x = torch.tensor([values], dtype=torch.float64)
    y = x[:, order]
    a, b = (plan_batch({"input_ids": torch.ones(1, 6).long(), "x": v}, MicroBatchSpec()).digest() for v in (x, y))
    assert (a == b) == torch.equal(x, y)


def test_build_raises_on_too_small_n_mbs_or_padded_length() -> None:
    plan = plan_batch(samples_of([5, 5]), MicroBatchSpec(max_tokens_per_mb=8, payloads=("image",)), align=4)
    with pytest.raises(ValueError, match="n_mbs = 1: this rank's samples need 2"):
        plan.build(n_mbs=1, device=CPU)
    for length in (4, 9):
        with pytest.raises(ValueError, match=f"padded_length = {length}: .* 8, and a multiple of 4"):
            plan.build(n_mbs=2, device=CPU, padded_length=length)


@pytest.mark.parametrize("as_list", [False, True])
def test_cost_of_a_plan_is_of_its_samples_and_not_of_their_tokens(as_list: bool) -> None:
    """A plan of a million tokens takes 15 ms. A loop over the tokens would run 1,500 more lines for each sample."""

    def lines_per_sample(rows: int, width: int) -> float:
        mask = torch.arange(width) < torch.randint(width // 2, width + 1, (rows, 1))
        batch: Any = {
            "input_ids": torch.randint(VOCAB, (rows, width)),
            "attention_mask": mask,
            **{key: torch.rand(rows, width) for key in ("loss_mask", "advantages", "logprobs")},
        }
        if as_list:
            batch = [{key: x[i][mask[i]] for key, x in batch.items() if key != "attention_mask"} for i in range(rows)]
        spec = MicroBatchSpec(max_tokens_per_mb=16384)
        return lines_of(lambda: build(plan_batch(batch, spec, align=8, vocab_size=VOCAB))) / rows

    large, fewer, shorter = lines_per_sample(512, 2048), lines_per_sample(128, 2048), lines_per_sample(512, 256)
    print(
        f"lines for each sample: {large:.0f}; of a quarter of the samples {fewer:.0f}; of an eighth of the tokens {shorter:.0f}"
    )
    assert 0 < large < 1.25 * min(fewer, shorter)
