"""GAE and discounted returns: against loops in plain Python, on ragged data, with gaps, and at length."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal.trainer.advantages import discounted_returns, gae
from areal.utils.data import pad

Rows = list[dict[str, Tensor]]


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def rows_of(lengths: list[int], seed: int, action_fraction: float = 0.6, dtype: torch.dtype = torch.float64) -> Rows:
    """Random sequences with rewards and values, whose actions are a fraction of the positions."""
    generator = torch.Generator().manual_seed(seed)

    def random(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)

    rows = []
    for n in lengths:
        mask = (torch.rand(n, generator=generator) < action_fraction).float() * 0.5
        rows.append({"rewards": random(n) * (mask != 0), "values": 10 * random(n), "mask": mask, "after": random(1)[0]})
    return rows


def packed(rows: Rows, key: str) -> Tensor:
    return torch.cat([row[key] for row in rows]) if rows else torch.zeros(0)


def loop(row: dict[str, Tensor], gamma: float, lam: float, bootstrap: bool) -> tuple[list[float], list[float]]:
    """Advantages and returns of one sequence, from its end to its beginning."""
    advantages, returns = [0.0] * len(row["mask"]), [0.0] * len(row["mask"])
    following, running = row["after"].item() if bootstrap else 0.0, 0.0
    for t in reversed(range(len(row["mask"]))):
        if row["mask"][t] == 0:
            continue
        value = row["values"][t].item()
        running = row["rewards"][t].item() + gamma * following - value + gamma * lam * running
        following = value
        advantages[t], returns[t] = running, running + value
    return advantages, returns


def expected(rows: Rows, gamma: float, lam: float, bootstrap: bool) -> tuple[Tensor, Tensor]:
    both = [loop(row, gamma, lam, bootstrap) for row in rows]
    advantages, returns = ([x for pair in both for x in pair[i]] for i in (0, 1))
    return torch.tensor(advantages, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)


def close(actual: Tensor, want: Tensor, tolerance: float = 1e-11) -> None:
    assert actual.shape == want.shape
    assert torch.equal(actual == 0, want == 0)  # nothing where there is no action
    assert (actual - want).abs().max().item() <= tolerance * (1 + want.abs().max().item()) if actual.numel() else True


DISCOUNTS = st.sampled_from([0.0, 0.3, 0.95, 0.999, 1.0])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=7), st.integers(0, 10**6), DISCOUNTS, DISCOUNTS, st.booleans())
def test_packed_gae_equals_reference_loop(
    lengths: list[int], seed: int, gamma: float, lam: float, bootstrap: bool
) -> None:
    rows = rows_of(lengths, seed)
    after = torch.stack([row["after"] for row in rows]) if bootstrap else None
    inputs = [packed(rows, key) for key in ("rewards", "values", "mask")]
    actual = gae(*inputs, bounds_of(lengths), gamma=gamma, lam=lam, bootstrap=after)
    want = expected(rows, gamma, lam, bootstrap)
    close(actual.advantages, want[0])
    close(actual.returns, want[1])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 23), min_size=1, max_size=7), st.integers(0, 10**6), DISCOUNTS, DISCOUNTS, st.booleans())
def test_padded_gae_equals_reference_loop(
    lengths: list[int], seed: int, gamma: float, lam: float, bootstrap: bool
) -> None:
    rows = rows_of(lengths, seed)
    after = torch.stack([row["after"] for row in rows]) if bootstrap else None
    rewards, mask = (pad([row[key] for row in rows], width=25)[0] for key in ("rewards", "mask"))
    values, real = pad([row["values"] for row in rows], value=float("nan"), width=25)
    actual = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=after)
    want = expected(rows, gamma, lam, bootstrap)
    for name, flat in zip(actual._fields, want, strict=True):
        padded = getattr(actual, name)
        assert not padded[~real].any()
        close(padded[real], flat)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_gae_skips_positions_between_actions(gamma: float) -> None:
    rows = rows_of([40, 1, 17], seed=3)
    inputs = [packed(rows, key) for key in ("rewards", "values", "mask")]
    acts = inputs[2] != 0
    closed = [sum(row["mask"] != 0).item() for row in rows]
    inputs[1][~acts] = float("nan")
    with_gaps = gae(*inputs, bounds_of([40, 1, 17]), gamma=gamma, lam=0.8)
    without = gae(*[x[acts] for x in inputs], bounds_of(closed), gamma=gamma, lam=0.8)
    assert 0 < int(acts.sum()) < len(acts)
    for actual, want in zip(with_gaps, without, strict=True):
        assert torch.equal(actual[acts], want)
        assert not actual[~acts].any()


def test_gae_equals_hand_computed_values() -> None:
    # Two actions with a tool's output between, then the end: delta = (0 + .5 * 4 - 2, 3 - 4) = (0, -1).
    rewards, values = torch.tensor([0.0, 0.0, 3.0, 0.0]), torch.tensor([2.0, 99.0, 4.0, 7.0])
    mask, bounds = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 4])
    actual = gae(rewards, values, mask, bounds, gamma=0.5, lam=0.5)
    assert actual.advantages.tolist() == [-0.25, 0.0, -1.0, 0.0]
    assert actual.returns.tolist() == [1.75, 0.0, 3.0, 0.0]
    cut_off = gae(rewards, values, mask, bounds, gamma=0.5, lam=0.5, bootstrap=torch.tensor([7.0]))
    assert cut_off.advantages.tolist() == [-0.25 + 0.25 * 3.5, 0.0, 2.5, 0.0]


def test_nan_value_affects_only_its_sequence() -> None:
    rows = rows_of([9, 30, 12], seed=1, action_fraction=1.0)
    rows[1]["values"][20] = float("nan")
    inputs = [packed(rows, key) for key in ("rewards", "values", "mask")]
    actual = gae(*inputs, bounds_of([9, 30, 12]), gamma=1.0, lam=1.0).advantages
    assert actual[:9].isfinite().all()
    assert actual[39:].isfinite().all()
    assert actual[9:30].isnan().all()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.999, 1.0), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_of_long_sequences_is_accurate_to_its_dtype(gamma: float, lam: float, dtype: torch.dtype) -> None:
    lengths = [32768, 3, 5000]
    rows = rows_of(lengths, seed=5, action_fraction=0.9, dtype=dtype)
    inputs = [packed(rows, key) for key in ("rewards", "values", "mask")]
    actual = gae(*inputs, bounds_of(lengths), gamma=gamma, lam=lam)
    for name, want in zip(actual._fields, expected(rows, gamma, lam, bootstrap=False), strict=True):
        it = getattr(actual, name)
        assert it.dtype == dtype
        # One rounding of the result; the sums themselves cost a few units of float64.
        bound = torch.finfo(dtype).eps / 2 * want.abs() + 1e-11 * (1 + want.abs().max())
        assert ((it.double() - want).abs() <= bound).all()


def test_half_precision_gae_returns_float32() -> None:
    rows = rows_of([50, 20], seed=2, dtype=torch.bfloat16)
    inputs = [packed(rows, key) for key in ("rewards", "values", "mask")]
    actual = gae(*inputs, bounds_of([50, 20]), gamma=0.99, lam=0.95)
    assert (actual.advantages.dtype, actual.returns.dtype) == (torch.float32, torch.float32)
    assert (actual.advantages.double() - expected(rows, 0.99, 0.95, False)[0]).abs().max() < 1e-5


def test_gae_results_have_no_gradient() -> None:
    values = torch.randn(6, requires_grad=True)
    actual = gae(torch.ones(6), values, torch.ones(6), torch.tensor([0, 2, 6]), gamma=1.0, lam=0.9)
    assert not actual.advantages.requires_grad
    assert not actual.returns.requires_grad


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=7), st.integers(0, 10**6), DISCOUNTS)
def test_discounted_returns_equal_gae_without_a_critic(lengths: list[int], seed: int, gamma: float) -> None:
    rows = [{**row, "values": torch.zeros_like(row["values"])} for row in rows_of(lengths, seed)]
    want = expected(rows, gamma, 1.0, bootstrap=False)[0]
    close(discounted_returns(packed(rows, "rewards"), packed(rows, "mask"), bounds_of(lengths), gamma=gamma), want)
    if min(lengths) > 0:
        rewards, real = pad([row["rewards"] for row in rows])
        padded = discounted_returns(rewards, pad([row["mask"] for row in rows])[0], gamma=gamma)
        close(padded[real], want)


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def work_of(call: Callable[[], Any]) -> int:
    """Operations of torch, and lines of this package, that a call takes."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if "trainer/advantages" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    with _Ops() as ops:
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
    return ops.n + lines


def test_gae_operations_grow_with_log_of_length() -> None:
    def of(length: int) -> int:
        rows = rows_of([length], seed=0, action_fraction=1.0)
        inputs = [packed(rows, key) for key in ("rewards", "values", "mask")]
        return work_of(lambda: gae(*inputs, bounds_of([length]), gamma=1.0, lam=1.0))

    short, long = of(1024), of(32768)
    assert short < 400
    rounds = math.log2(32768 / 1024)
    assert 0 < long - short <= 20 * rounds


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.1}, r"gamma = 1.1: a discount is from 0 to 1"),
        ({"lam": -0.1}, r"lam = -0.1"),
        ({"gamma": float("nan")}, r"gamma = nan"),
        ({"values": torch.ones(5)}, r"values are \[5\] and rewards \[4\]"),
        ({"action_mask": torch.ones(5)}, r"rewards are \[4\] and action_mask is \[5\]"),
        ({"action_mask": torch.tensor([1, 1, 0, 1])}, r"rewards\[2\] = 1.0, where action_mask is 0.*at_last_action"),
        ({"bootstrap": torch.ones(3)}, r"bootstrap is \[3\] for 2 sequences"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens \[0, 3\] does not cut a tensor of \[4\]"),
        ({"cu_seqlens": torch.tensor([1, 4])}, r"cu_seqlens \[1, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, r"cu_seqlens \[0, 3, 2, 4\]"),
        ({"cu_seqlens": None}, r"action_mask is \[4\] and there is no cu_seqlens"),
    ],
)
def test_invalid_arguments_raise(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        **{"rewards": ONES, "values": ONES, "action_mask": ONES, "cu_seqlens": torch.tensor([0, 1, 4])},
        **{"gamma": 1.0, "lam": 1.0, "bootstrap": torch.zeros(2)},
    }
    gae(**good)
    with pytest.raises(ValueError, match=message):
        gae(**{**good, **change})
