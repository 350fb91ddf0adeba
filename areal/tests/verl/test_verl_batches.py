"""Flags and columns of verl's batches that the engine refuses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

import numpy as np
import torch
from verl import DataProto

from areal.integrations.verl.engine import _check_batch


def batch_of(columns: dict[str, Any], **flags: Any) -> Any:
    """Return a batch of two samples as verl's trainer sends it to a worker."""
    objects = {name: np.array(values, dtype=object) for name, values in columns.items()}
    return DataProto.from_dict({"loss_mask": torch.ones(2, 3)}, objects, flags).to_tensordict()


def test_text_of_the_agent_loop_is_accepted() -> None:
    data = batch_of({"multi_modal_inputs": [{}, {}]}, temperature=1.0)
    assert "multi_modal_inputs" in data
    _check_batch(data)


@pytest.mark.parametrize(
    ("columns", "flags", "name"),
    [
        ({"multi_modal_inputs": [{}, {"pixel_values": torch.ones(2)}]}, {}, "multi_modal_inputs"),
        ({}, {"calculate_sum_pi_squared": True}, "calculate_sum_pi_squared"),
    ],
)
def test_unsupported_columns_and_flags_are_refused(columns: dict[str, Any], flags: dict[str, Any], name: str) -> None:
    data = batch_of(columns, **flags)
    with pytest.raises(ValueError, match=f"{name} = True with engine.strategy = 'areal'.*leave it out"):
        _check_batch(data)
