"""Shaping of rewards, and conversion of per-sequence values to tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.trainer.advantages import (
    at_last_action,
    gae,
    join,
    kl_penalized,
    normalize,
    overlong_penalty,
    split,
    to_samples,
    to_tokens,
)
from areal.utils.data import Segment, from_segments, pad


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


# ---- from sequences to tokens


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=9), min_size=1, max_size=6))
def test_sequence_values_broadcast_to_actions_in_every_format(weights: list[list[float]]) -> None:
    masks = [torch.tensor(row) for row in weights]
    x = torch.arange(1.0, 1 + len(masks), dtype=torch.float64)
    want = [[x[i].item() if w else 0.0 for w in row] for i, row in enumerate(weights)]
    last = [[0.0] * len(row) for row in weights]
    for i, row in enumerate(weights):
        actions = [t for t, w in enumerate(row) if w]
        if actions:
            last[i][actions[-1]] = x[i].item()
    assert [row.tolist() for row in to_samples(x, masks)] == want
    packed, bounds = join(masks)
    assert [row.tolist() for row in split(to_tokens(x, packed, bounds), bounds)] == want
    assert [row.tolist() for row in split(at_last_action(x, packed, bounds), bounds)] == last
    padded, real = pad(masks, width=10)
    for actual, rows in ((to_tokens(x, padded), want), (at_last_action(x, padded), last)):
        assert actual.dtype == torch.float64
        assert not actual[~real].any()
        assert actual[real].tolist() == [x for row in rows for x in row]


def test_broadcast_values_align_with_segment_samples() -> None:
    turn = [Segment([1, 2, 3], False), Segment([4, 5], True), Segment([6], False), Segment([7], True)]
    sample = from_segments(turn)
    advantages = to_samples(torch.tensor([0.5]), [sample["loss_mask"]])
    assert advantages[0].tolist() == [0.0, 0.0, 0.5, 0.5, 0.0, 0.5, 0.0]
    reward = at_last_action(torch.tensor([3.0]), sample["loss_mask"], bounds_of([7]))
    assert reward.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0]


def test_join_without_sequences_gives_a_rank_of_a_collective_nothing() -> None:
    x, cu_seqlens = join([])
    assert (x.shape, cu_seqlens.tolist(), split(x, cu_seqlens)) == ((0,), [0], [])
    assert gae(x, x, x, cu_seqlens, gamma=1.0, lam=0.9).advantages.shape == (0,)
    assert normalize(x, x, sum_over_ranks=lambda y: y).shape == (0,)
    assert to_samples(torch.zeros(0), []) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_tokens(torch.ones(3), torch.ones(4), bounds_of([1, 3])), r"shape \[3\] for 2 sequences"),
        (lambda: at_last_action(torch.ones(2, 1), torch.ones(2, 4)), r"shape \[2, 1\] for 2 sequences"),
        (lambda: to_samples(torch.ones(1), [torch.ones(4)] * 2), r"shape \[1\] for 2 sequences"),
        (lambda: to_tokens(torch.ones(1), torch.ones(4)), r"\[4\] and there is no cu_seqlens"),
        (lambda: join([torch.ones(2, 2)]), r"\[\[2, 2\]\]"),
        (lambda: split(torch.ones(5), bounds_of([4])), r"does not cut a tensor of \[5\]"),
    ],
)
def test_mismatched_shapes_raise(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---- shaping


def test_overlong_penalty_is_linear_in_length() -> None:
    lengths = torch.tensor([1, 60, 61, 70, 80, 99, 100, 101, 5000])
    actual = overlong_penalty(lengths, max_length=100, cache_length=40)
    assert actual.tolist() == pytest.approx([0, 0, -1 / 40, -10 / 40, -20 / 40, -39 / 40, -1, -1, -1])
    assert actual.dtype == torch.float32
    doubled = overlong_penalty(lengths, max_length=100, cache_length=40, factor=2.0)
    assert torch.equal(doubled, 2 * actual)
    assert overlong_penalty(torch.tensor([99, 100]), max_length=100, cache_length=1).tolist() == [0, -1]
    assert overlong_penalty(torch.tensor([25]), max_length=100, cache_length=100).tolist() == [-0.25]


def test_kl_penalty_applies_only_to_actions() -> None:
    rewards, mask = torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.tensor([1, 0, 1, 0])
    kl = torch.tensor([0.5, float("nan"), -0.25, 7.0], dtype=torch.float64, requires_grad=True)
    actual = kl_penalized(rewards, kl, mask, coef=0.1)
    torch.testing.assert_close(actual, torch.tensor([-0.05, 0.0, 1.025, 0.0], dtype=torch.float64))
    assert not actual.requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: overlong_penalty(torch.ones(1), max_length=8, cache_length=9),
            r"cache_length = 9 with max_length = 8",
        ),
        (lambda: overlong_penalty(torch.ones(1), max_length=8, cache_length=0), r"cache_length = 0"),
        (lambda: overlong_penalty(torch.ones(1), max_length=8, cache_length=2, factor=-1), r"factor = -1"),
        (lambda: kl_penalized(torch.ones(3), torch.ones(3), torch.ones(2), coef=0.1), r"action_mask \[2\]"),
        (lambda: kl_penalized(torch.ones(3), torch.ones(3), torch.ones(3), coef=-0.1), r"coef = -0.1"),
    ],
)
def test_invalid_shaping_arguments_raise(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
