"""Errors of a micro-batch say where they were raised."""

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
