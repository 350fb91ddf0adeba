"""Errors of a micro-batch say where they were raised, and what to do if memory ran out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.engine.faults import locate

MB: Any = SimpleNamespace(index=3, n_tokens=5, padded_length=8, seqlens=(5,))
HERE = r"areal/tests/unit/engine/test_faults_text\.py"


def test_error_names_the_lines_that_raised_it() -> None:
    with pytest.raises(TypeError) as info:
        torch.nn.functional.silu(None)  # type: ignore[arg-type]
    text = r"TypeError in micro-batch 3 of 5 tokens \(8 padded, 1 sequences\): .*"
    raised = rf"\(raised at torch/nn/functional\.py:\d+ in silu, called at {HERE}:\d+ in test_error_names"
    with pytest.raises(RuntimeError, match=text + raised):
        raise locate(info.value, MB)


def test_error_of_a_value_keeps_its_text() -> None:
    assert str(locate(ValueError("lr = 2: lower it"), MB)).startswith("lr = 2: lower it (in micro-batch 3")


@pytest.mark.parametrize(
    ("seqlens", "way_out"),
    [((5,), "shorten the sequence, or choose a larger c"), ((2, 3), "lower mb_spec.max_tokens_per_mb")],
)
def test_way_out_of_memory_depends_on_the_sequences(seqlens: tuple[int, ...], way_out: str) -> None:
    mb: Any = SimpleNamespace(**{**vars(MB), "seqlens": seqlens})
    text = str(locate(torch.OutOfMemoryError("8 GiB"), mb))
    assert f"{len(seqlens)} sequences): {way_out}, or set activation_checkpointing = 'full' (8 GiB)" in text
