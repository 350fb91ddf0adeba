"""Aggregations against loops over sequences, with weights, empty sequences and groups."""

from __future__ import annotations

import math

import pytest
import torch

from areal.api import Batch
from areal.tests.unit.losses.losses_world import CU, MASK, rows, values
from areal.trainer.losses import (
    Aggregation,
    FixedLength,
    GroupTokenMean,
    SequenceMean,
    SequenceMeanOfSums,
    TokenMean,
    trained_sequences,
)

LOSS = values(3)
WEIGHTS = MASK * torch.tensor([1.0, 0.5, 2.0] * 5, dtype=torch.float64)[: len(MASK)]
GROUPS = [[0, 1, 2], [3, 4]]
SUMS = [sum((LOSS[t] * WEIGHTS[t]).item() for t in range(a, b)) for a, b in rows()]
COUNTS = [sum(WEIGHTS[t].item() for t in range(a, b)) for a, b in rows()]
TRAINED = [i for i, count in enumerate(COUNTS) if count]
GROUP_SUMS = [sum(COUNTS[i] for i in group) for group in GROUPS]
GROUP_OF = torch.tensor([GROUP_SUMS[0]] * 3 + [GROUP_SUMS[1]] * 2, dtype=torch.float64)

CASES: dict[str, tuple[Aggregation, float, float]] = {
    "token_mean": (TokenMean(), sum(SUMS), sum(COUNTS)),
    "sequence_mean": (SequenceMean(), sum(SUMS[i] / COUNTS[i] for i in TRAINED), len(TRAINED)),
    "sequence_sums": (SequenceMeanOfSums(), sum(SUMS), len(TRAINED)),
    "fixed_length": (FixedLength(7), sum(SUMS) / 7, len(TRAINED)),
    "groups": (
        GroupTokenMean(),
        sum(sum(SUMS[i] for i in group) / total for group, total in zip(GROUPS, GROUP_SUMS, strict=True)),
        2,
    ),
}


def batch(weights: torch.Tensor = WEIGHTS) -> Batch:
    return Batch({"loss_mask": weights, "target_ids": torch.ones(len(MASK)).long(), "group_tokens": GROUP_OF}, CU)


@pytest.mark.parametrize("name", CASES)
def test_total_and_weight_equal_formula(name: str) -> None:
    aggregation, total, weight = CASES[name]
    assert aggregation.total(LOSS, batch()).item() == pytest.approx(total, rel=1e-12)
    assert aggregation.weight(batch()).item() == pytest.approx(weight, rel=1e-6)
    assert len(TRAINED) == 4


@pytest.mark.parametrize("name", CASES)
def test_masked_tokens_do_not_affect_total_or_gradient(name: str) -> None:
    aggregation, total, _ = CASES[name]
    dirty = LOSS.masked_fill(MASK == 0, math.nan).requires_grad_()
    actual = aggregation.total(dirty, batch())
    actual.backward()
    assert actual.item() == pytest.approx(total, rel=1e-12)
    assert dirty.grad is not None
    assert not dirty.grad[MASK == 0].any()
    assert torch.autograd.gradcheck(lambda x: aggregation.total(x, batch()), (LOSS.clone().requires_grad_(),))


@pytest.mark.parametrize("name", CASES)
def test_untrained_batch_has_zero_weight(name: str) -> None:
    empty = Batch(
        {"loss_mask": torch.zeros(14), "target_ids": torch.ones(14), "group_tokens": torch.zeros(5)},
        CU,
    )
    assert CASES[name][0].weight(empty) == 0
    assert CASES[name][0].total(LOSS, empty) == 0


def test_missing_mask_counts_every_target() -> None:
    targets = torch.where(MASK != 0, 3, -100)
    for ids in (targets, torch.stack([targets, torch.full_like(targets, -100)], -1)):
        plain = Batch({"target_ids": ids}, CU)
        assert TokenMean().weight(plain) == MASK.sum()
        assert TokenMean().total(LOSS, plain).item() == pytest.approx((LOSS * MASK).sum().item())
        assert trained_sequences(plain).tolist() == [True, True, False, True, True]


def test_half_precision_is_summed_in_float32() -> None:
    for aggregation, _, _ in CASES.values():
        actual = aggregation.total(LOSS.bfloat16(), batch(WEIGHTS.bfloat16()))
        assert actual.dtype in (torch.float32, torch.float64)
        assert aggregation.weight(batch(WEIGHTS.bfloat16())).dtype in (torch.float32, torch.float64)


@pytest.mark.parametrize("length", [0, -3, math.inf, math.nan])
def test_invalid_fixed_length_raises(length: float) -> None:
    with pytest.raises(ValueError, match=r"FixedLength.length = "):
        FixedLength(length)


def test_missing_group_tokens_raise() -> None:
    with pytest.raises(ValueError, match=r"group_tokens.*sum of loss_mask"):
        GroupTokenMean().weight(Batch({"loss_mask": MASK}, CU))
