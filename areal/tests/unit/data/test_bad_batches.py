"""Malformed batches: each kind raises an error that names the fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.api import MicroBatchSpec
from areal.tests.unit.data.bad_batches import BAD_BATCHES, GOOD, VOCAB
from areal.utils.data import plan_batch


@pytest.mark.parametrize(
    ("batch", "spec", "message"), [case[1:] for case in BAD_BATCHES], ids=[c[0] for c in BAD_BATCHES]
)
def test_malformed_batches_raise_and_name_the_fault(batch: Any, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_batch(batch, MicroBatchSpec(**spec), vocab_size=VOCAB)


def test_negative_ids_raise_without_a_vocabulary_size() -> None:
    with pytest.raises(ValueError, match="sample 0 at position 0 is -1, outside the vocabulary"):
        plan_batch({"input_ids": torch.tensor([[-1, 3]])}, MicroBatchSpec())


def test_token_budget_below_alignment_raises() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_mb = 6 is below the alignment of 8"):
        plan_batch(GOOD, MicroBatchSpec(max_tokens_per_mb=6, overlong="drop"), align=8)


def test_alignment_padding_counts_in_token_budget() -> None:
    with pytest.raises(ValueError, match=r"sample 0 has 3 tokens \(4 aligned\)"):
        plan_batch(GOOD, MicroBatchSpec(max_tokens_per_mb=3), align=2)
