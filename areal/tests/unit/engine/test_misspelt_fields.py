"""Fields of a configuration under the names of other libraries, or misspelt."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from areal.api import TrainEngineConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimiser": {}}, "did you mean 'optimizer'"),
        ({"model_name_or_path": "m"}, "did you mean 'path'"),
        ({"optimizer": {"learning_rate": 1e-4}}, "OptimizerConfig has no field 'learning_rate': did you mean 'lr'"),
        ({"lora": {"r": 8}}, "LoRAConfig has no field 'r': did you mean 'rank'"),
        ({"lora": {"lora_alpha": 8}}, "did you mean 'alpha'"),
        ({"mb_spec": {"max_token_per_mb": 8}}, "did you mean 'max_tokens_per_mb'"),
        ({"mb_spec": {"colour": 8}}, "Extra inputs are not permitted"),
        ({"dtype": "fp32"}, "'bfloat16', 'float32' or 'float64'"),
    ],
)
def test_misspelt_fields_are_refused_with_the_right_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainEngineConfig(**{"path": "m", **fields})


def test_section_of_another_engine_may_resemble_a_field() -> None:
    assert TrainEngineConfig(path="m", backend="fsdp2:d1", fsdp2={"x": 1}).model_extra == {"fsdp2": {"x": 1}}
