"""Packing and padding: partitions, budgets, and round trips."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.tests.harness.lines import lines_of
from areal.utils.data import from_left_padded, pack, pad, round_up, row_lengths, unpad

LENGTHS = st.lists(st.integers(1, 48), max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(64, 200), st.integers(1, 12), st.integers(1, 16))
def test_packing_is_a_partition_within_the_aligned_budget(
    lengths: list[int], budget: int, min_bins: int, align: int
) -> None:
    bins = pack(lengths, budget, min_bins=min_bins, align=align)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(members and members == sorted(members) for members in bins)
    assert all(round_up(sum(lengths[i] for i in members), align) <= budget for members in bins)
    assert len(bins) >= min(min_bins, len(lengths))
    assert bins == pack(lengths, budget, min_bins=min_bins, align=align)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 12))
def test_packing_without_budget_balances_bins(lengths: list[int], min_bins: int) -> None:
    bins = pack(lengths, None, min_bins=min_bins)
    assert len(bins) == min(min_bins, len(lengths))
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in members) for members in bins]
    # Longest first into the least loaded bin: bin totals differ by at most one sequence.
    assert not loads or max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize("wanted", range(7, 18))
def test_packing_keeps_budget_where_even_spreading_exceeds_it(wanted: int) -> None:
    # These lengths fit in seven bins. Spread longest-first over eight, each bin gets a 50 and a 33, and the last 33
    # does not fit.
    lengths = [50] * 8 + [33] * 9
    assert len(pack(lengths, 100)) == 7
    assert max(sum(lengths[i] for i in members) for members in pack(lengths, None, min_bins=8)) > 100
    bins = pack(lengths, 100, min_bins=wanted)
    assert len(bins) == wanted
    assert sorted(i for members in bins for i in members) == list(range(17))
    assert max(sum(lengths[i] for i in members) for members in bins) <= 100


@pytest.mark.parametrize("budget", [4096, 8192, 16384])
@pytest.mark.parametrize("seed", range(5))
def test_packing_uses_at_most_one_bin_above_the_lower_bound(budget: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 2048) for _ in range(4096)]
    assert len(pack(lengths, budget)) <= -(-sum(lengths) // budget) + 1


@pytest.mark.parametrize("longest", [1, 500, 4096])
def test_cost_of_packing_grows_as_n_log_n(longest: int) -> None:
    """4,096 lengths take 15 ms. A loop over all bins for each length would run eight times the lines."""

    def lines_per_length(n: int) -> float:
        rng = random.Random(0)
        lengths = [rng.randint(1, longest) for _ in range(n)]
        return lines_of(lambda: pack(lengths, 4096, align=8)) / n

    assert 0 < lines_per_length(4096) < 1.5 * lines_per_length(512)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lengths": [3, 9], "budget": 8}, r"lengths\[1\] = 9 does not fit the budget of 8"),
        ({"lengths": [3, 7], "budget": 8, "align": 6}, r"lengths\[1\] = 7 .*aligned to 6: 6"),
        ({"lengths": [3, 0], "budget": 8}, r"lengths\[1\] = 0: a sequence has at least 1 token"),
        ({"lengths": [3], "budget": None, "min_bins": 0}, "min_bins = 0"),
        ({"lengths": [3], "budget": 8, "align": 0}, "align = 0"),
    ],
)
def test_invalid_packing_arguments_raise(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(**kwargs)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_unpad_inverts_pad(lengths: list[int], extra: int) -> None:
    tensors = [torch.rand(n, 2) for n in lengths]
    padded, mask = pad(tensors, value=-1, width=max(lengths) + extra)
    assert padded.shape == (len(lengths), max(lengths) + extra, 2)
    assert torch.equal(padded == -1, ~mask[..., None].expand_as(padded))
    assert all(torch.equal(a, b) for a, b in zip(unpad(padded, mask), tensors, strict=True))


def test_invalid_padding_arguments_raise() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        pad([])
    with pytest.raises(ValueError, match="width = 2 for a tensor of 3"):
        pad([torch.zeros(3)], width=2)
    with pytest.raises(ValueError, match=r"shape \[2, 2\] at 1 beside \[2, 3\] at 0"):
        pad([torch.zeros(2, 3), torch.zeros(2, 2)])
    with pytest.raises(ValueError, match="both start with"):
        unpad(torch.zeros(2, 3), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 1, 1], r"attention_mask\[1\] is left-padded.*from_left_padded"),
        ([1, 0, 1], r"attention_mask\[1\] has a hole.*from_left_padded"),
        ([1, 2, 2], r"attention_mask\[1\] holds 2: .*pass packed sequences as a list"),
        ([1.0, 0.5, 0.0], r"attention_mask\[1\] holds 0.5"),
    ],
)
def test_mask_that_is_not_right_padded_raises(row: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_lengths(torch.tensor([[1, 1, 0], row]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_row_lengths(dtype: torch.dtype) -> None:
    assert row_lengths(torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]).to(dtype)) == [2, 3, 0]


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=5))
def test_from_left_padded_moves_all_per_token_keys(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    ids = torch.arange(mask.numel()).reshape(mask.shape)
    batch = {"input_ids": ids, "attention_mask": mask, "pairs": torch.stack([ids, -ids], -1), "row": ids.clone()}
    kept = {**batch, "reward": torch.rand(len(rows)), "meta": {"a": 1}}
    before = ids.clone()
    moved = from_left_padded(kept, per_sequence=("row",))
    lengths = row_lengths(moved["attention_mask"])
    for i, n in enumerate(lengths):
        assert torch.equal(moved["input_ids"][i, :n], ids[i][mask[i]])
        assert torch.equal(moved["pairs"][i, :n, 1], -ids[i][mask[i]])
    assert moved["row"] is kept["row"]
    assert moved["reward"] is kept["reward"]
    assert moved["meta"] is kept["meta"]
    assert torch.equal(ids, before)


def test_from_left_padded_requires_attention_mask() -> None:
    with pytest.raises(ValueError, match="needs attention_mask"):
        from_left_padded({"input_ids": torch.zeros(2, 3)})
