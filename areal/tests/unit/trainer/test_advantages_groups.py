"""Group-relative advantages, REINFORCE++ and normalisation: against plain Python in exact fractions or float64."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.trainer.advantages import (
    Groups,
    dr_grpo,
    grpo,
    kl_penalized,
    normalize,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from areal.utils.data import pad

MEMBERS = st.lists(
    st.tuples(st.integers(-3, 3), st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0, 1 / 3])), min_size=1, max_size=24
)


def of(members: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    keys = torch.tensor([key for key, _ in members]) * 10**15
    return torch.tensor([reward for _, reward in members], dtype=torch.float64), keys


def others_of(members: list[tuple[int, float]], i: int) -> list[Fraction]:
    return [Fraction(reward) for j, (key, reward) in enumerate(members) if key == members[i][0] and j != i]


def group_of(members: list[tuple[int, float]], i: int) -> list[Fraction]:
    return [Fraction(reward) for key, reward in members if key == members[i][0]]


def std(numbers: list[Fraction], ddof: int) -> float:
    if len(numbers) <= ddof:
        return 0.0
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - ddof))


def check(actual: Tensor, want: list[float], equal: list[bool]) -> None:
    torch.testing.assert_close(actual, torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert all(x == 0 for x, same in zip(actual.tolist(), equal, strict=True) if same)


@settings(deadline=None)
@given(MEMBERS, st.sampled_from([0, 1]), st.sampled_from([0.0, 1e-6, 0.1]))
def test_grpo_equals_formula(members: list[tuple[int, float]], ddof: int, eps: float) -> None:
    want, equal = [], []
    for i, (_, reward) in enumerate(members):
        group = group_of(members, i)
        spread = std(group, ddof) + eps
        want.append(float(Fraction(reward) - sum(group) / len(group)) / spread if spread else 0.0)
        equal.append(len(set(group)) == 1)
    rewards, keys = of(members)
    check(grpo(rewards, Groups.local(keys), ddof=ddof, eps=eps), want, equal)


@settings(deadline=None)
@given(MEMBERS)
def test_dr_grpo_and_rloo_equal_formulas(members: list[tuple[int, float]]) -> None:
    from_mean, from_others, equal = [], [], []
    for i, (_, reward) in enumerate(members):
        group, others = group_of(members, i), others_of(members, i)
        from_mean.append(float(Fraction(reward) - sum(group) / len(group)))
        from_others.append(float(Fraction(reward) - sum(others) / len(others)) if others else 0.0)
        equal.append(len(set(group)) == 1)
    rewards, keys = of(members)
    check(dr_grpo(rewards, Groups.local(keys)), from_mean, equal)
    check(rloo(rewards, Groups.local(keys)), from_others, equal)


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_single_member_or_equal_rewards_give_zero_advantage(estimator: Any) -> None:
    rewards = torch.tensor([5.0, 0.1, 0.1, 0.1, 0.0, 1.0])
    actual = estimator(rewards, Groups.local(torch.tensor([9, 4, 4, 4, 2, 2])))
    assert actual.dtype == torch.float32
    assert not actual[:4].any()
    assert actual[4] < 0 < actual[5]
    assert estimator(torch.tensor([0, 1, 1]), Groups.local(torch.zeros(3, dtype=torch.int32))).dtype == torch.float32


def test_an_episode_with_many_sequences_counts_once() -> None:
    """Rewards 1 (one sequence) and 0 (four): without episodes the long one would pull the mean to 0.2."""
    rewards, keys = torch.tensor([1.0, 0, 0, 0, 0]), torch.zeros(5, dtype=torch.int64)
    groups = Groups.local(keys, torch.tensor([0, 1, 1, 1, 1]))
    assert dr_grpo(rewards, groups).tolist() == [0.5, -0.5, -0.5, -0.5, -0.5]
    assert rloo(rewards, groups).tolist() == [1.0, -1.0, -1.0, -1.0, -1.0]
    torch.testing.assert_close(grpo(rewards, groups, eps=0.0), torch.tensor([1.0, -1, -1, -1, -1]) / math.sqrt(2))
    assert groups.moments(rewards).count.tolist() == [2.0]


@settings(deadline=None)
@given(MEMBERS, st.lists(st.integers(1, 4), min_size=24, max_size=24), st.sampled_from([0, 1]))
def test_repeated_sequences_of_an_episode_do_not_change_advantages(
    members: list[tuple[int, float]], repeats: list[int], ddof: int
) -> None:
    rewards, keys = of(members)
    index = torch.arange(len(members)).repeat_interleave(torch.tensor(repeats[: len(members)]))
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    episodes = Groups.local(keys[index], index)
    for fn in (dr_grpo, rloo, lambda r, g: grpo(r, g, ddof=ddof, eps=0.1)):
        torch.testing.assert_close(fn(rewards[index], episodes), fn(rewards, Groups.local(keys))[index])


def test_sequences_of_an_episode_keep_their_own_reward() -> None:
    """Two games of two players: the mean of a game is 0, and the winner of each is above it."""
    rewards, keys = torch.tensor([1.0, -1, 3, -1], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    groups = Groups.local(keys, torch.tensor([5, 5, 8, 8]))
    assert dr_grpo(rewards, groups).tolist() == [0.5, -1.5, 2.5, -1.5]
    assert rloo(rewards, groups).tolist() == [0.0, -2.0, 3.0, -1.0]  # less the other game's mean: 1, then 0
    variance = (0.25 + 2.25) / 2 + (6.25 + 2.25) / 2
    want = torch.tensor([0.5, -1.5, 2.5, -1.5], dtype=torch.float64) / math.sqrt(variance)
    torch.testing.assert_close(grpo(rewards, groups, eps=0.0), want)
    # One game has nothing to be compared with.
    alone = Groups.local(keys, torch.zeros_like(keys))
    assert not any(fn(rewards, alone).any() for fn in (grpo, dr_grpo, rloo))


@pytest.mark.parametrize("offset", [0.0, 1e8, -1e12])
def test_normalization_is_accurate_at_large_mean(offset: float) -> None:
    x = torch.arange(1000, dtype=torch.float64).remainder(7) + offset
    actual = normalize(x, eps=0.0)
    want = (x - offset - (x - offset).mean()) / (x - offset).std()
    torch.testing.assert_close(actual, want, rtol=1e-12, atol=1e-12 + 1e-15 * abs(offset))


@pytest.mark.parametrize("n", [1, 3, 207269, 10**6])
@pytest.mark.parametrize("value", [0.1, -1e9 / 3, 0.0, 0.35526675833930643])
def test_equal_values_have_zero_variance(n: int, value: float) -> None:
    x = torch.full((n,), value, dtype=torch.float64)
    assert not normalize(x, eps=0.0).any()
    moments = Groups.whole_batch(x).moments(x)
    assert moments.squares.tolist() == [0.0]
    assert moments.mean.item() == pytest.approx(value, rel=3e-16)


def test_rounding_of_equal_rewards_gives_zero_advantage() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(400, generator=generator, dtype=torch.float64)
    sizes = torch.randint(2, 80, (400,), generator=generator)
    groups = Groups.local(torch.arange(400).repeat_interleave(sizes))
    rewards = values.repeat_interleave(sizes)
    assert not grpo(rewards, groups, eps=0.0).any()
    assert not groups.moments(rewards).squares.any()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.sampled_from([0.0, 0.5, 1.0])), max_size=30),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_normalization_covers_masked_values_only(entries: list[tuple[float, float]], ddof: int, scale: bool) -> None:
    x = torch.tensor([value for value, _ in entries], dtype=torch.float64)
    mask = torch.tensor([keep for _, keep in entries])
    x[mask == 0] = float("nan")
    kept = [Fraction(value) for value, keep in entries if keep]
    spread = std(kept, ddof) + 1e-3 if scale else 1.0
    actual = normalize(x, mask, ddof=ddof, eps=1e-3, scale=scale)
    want = [float(Fraction(v) - sum(kept) / len(kept)) / spread if keep else 0.0 for v, keep in entries]
    torch.testing.assert_close(actual, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert not actual[mask == 0].any()


def test_normalization_by_token_group_and_of_padded_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, keys = [3, 5, 2, 4], torch.tensor([8, 1, 8, 1])
    x, mask = torch.randn(14, generator=generator), torch.rand(14, generator=generator) < 0.8
    bounds = torch.tensor([0, 3, 8, 10, 14])
    actual = normalize(x, mask, groups=Groups.local(keys).of_tokens(bounds))
    token_keys = keys.repeat_interleave(torch.tensor(lengths))
    for key in (1, 8):
        mine = (token_keys == key) & mask
        want = (x[mine] - x[mine].mean()) / x[mine].std()
        torch.testing.assert_close(actual[mine], want)
    padded, real = pad(list(x.split(lengths)), value=float("nan"))
    batch = normalize(padded, real)
    assert batch.shape == padded.shape
    torch.testing.assert_close(batch[real], normalize(x))


def test_reinforce_plus_plus_equals_formula_of_paper() -> None:
    beta, lengths = 0.2, [4, 6, 3]
    generator = torch.Generator().manual_seed(1)
    kl = torch.randn(13, generator=generator, dtype=torch.float64)
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 0])
    outcome, bounds = [1.0, 0.0, 0.5], [0, 4, 10, 13]
    returns = {}
    for i, (start, end) in enumerate(pairwise(bounds)):
        for t in range(start, end):
            if mask[t]:
                returns[t] = outcome[i] - beta * sum(kl[j].item() for j in range(t, end) if mask[j])
    mean, spread = statistics.fmean(returns.values()), statistics.stdev(returns.values())
    want = torch.tensor([(returns[t] - mean) / spread if t in returns else 0.0 for t in range(13)], dtype=torch.float64)
    rewards = torch.zeros(13, dtype=torch.float64)
    rewards[[2, 8, 11]] = torch.tensor(outcome, dtype=torch.float64)
    cut = torch.tensor(bounds)
    actual = reinforce_plus_plus(kl_penalized(rewards, kl, mask, coef=beta), mask, cut, eps=0.0)
    torch.testing.assert_close(actual, want)
    rows = [pad(list(x.split(lengths)))[0] for x in (rewards, kl, mask)]
    padded = reinforce_plus_plus(kl_penalized(*rows, coef=beta), rows[2], eps=0.0)
    torch.testing.assert_close(torch.cat([row[:n] for row, n in zip(padded, lengths, strict=True)]), want)


def test_reinforce_plus_plus_baseline_normalizes_over_tokens() -> None:
    rewards, keys = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]), torch.tensor([0, 1, 0, 1, 1])
    lengths, mask = [2, 3, 1, 2, 2], torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 1, 1])
    centred = [0.5, -1 / 3, -0.5, 2 / 3, -1 / 3]
    tokens = [a for a, n in zip(centred, lengths, strict=True) for _ in range(n)]
    kept = [a for a, m in zip(tokens, mask, strict=True) if m]
    mean, spread = statistics.fmean(kept), statistics.stdev(kept)
    want = torch.tensor([(a - mean) / spread if m else 0.0 for a, m in zip(tokens, mask, strict=True)])
    bounds = torch.tensor([0, 2, 5, 6, 8, 10])
    actual = reinforce_plus_plus_baseline(rewards, Groups.local(keys), mask, bounds)
    torch.testing.assert_close(actual, want)


def test_group_mean_and_batch_std_can_be_combined() -> None:
    # The mean of the group and the spread of the batch, as some have it.
    rewards, keys = torch.tensor([0.0, 1.0, 4.0, 8.0]), torch.tensor([0, 0, 1, 1])
    deviation, moments = Groups.local(keys).deviations(rewards)
    assert moments.mean.tolist() == [0.5, 6.0]
    assert moments.std(0).tolist() == [0.5, 2.0]
    batch = Groups.whole_batch(rewards).moments(rewards).std()
    torch.testing.assert_close(batch, rewards.double().std()[None])
    assert (deviation / batch).shape == rewards.shape


def test_group_advantages_have_no_gradient() -> None:
    x = torch.randn(4, requires_grad=True)
    assert not grpo(x, Groups.local(torch.zeros(4, dtype=torch.int64))).requires_grad
    assert not normalize(x).requires_grad


IDS = torch.tensor([0, 0, 1])
ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Groups.local(torch.ones(3)), r"group_ids are torch.float32 \[3\]"),
        (lambda: Groups.local(torch.ones(3, 1).long()), r"group_ids are torch.int64 \[3, 1\]"),
        (lambda: Groups.over_ranks(IDS, 1, torch.clone), r"from 0 to 1 with n_groups = 1"),
        (lambda: Groups.over_ranks(IDS - 1, 2, torch.clone), r"from -1 to 0 with n_groups = 2"),
        (lambda: Groups.local(IDS).of_tokens(torch.tensor([0, 4])), r"1 sequences and the groups have 3"),
        (lambda: grpo(torch.ones(4), Groups.local(IDS)), r"shape \[4\] and a mask of None for groups of 3"),
        (lambda: grpo(ONES, Groups.local(IDS), ddof=2), r"ddof = 2"),
        (lambda: normalize(ONES, ddof=-1), r"ddof = -1"),
        (lambda: normalize(ONES, torch.ones(4)), r"shape \[3\] and a mask of \[4\]"),
        (lambda: normalize(ONES, groups=Groups.local(IDS), sum_over_ranks=torch.clone), r"Groups.over_ranks"),
        (lambda: rloo(torch.tensor([1.0, 2.0, float("nan")]), Groups.local(IDS)), r"group 1 has numbers .*nan"),
        (lambda: normalize(torch.tensor([1.0, float("inf")])), r"group 0 has numbers that are not finite .*inf"),
    ],
)
def test_invalid_arguments_raise(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
