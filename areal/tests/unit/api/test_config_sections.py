"""Sections of the configuration that are made from another one, or from a file of peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from areal.api import LoRAConfig, MicroBatchSpec


def test_resized_rules_keep_all_but_the_size() -> None:
    rules = MicroBatchSpec(max_tokens_per_mb=64, n_mbs=3, overlong="alone", share_prefixes=True, payloads=("image",))
    expected = MicroBatchSpec(samples_per_mb=4, overlong="alone", share_prefixes=True, payloads=("image",))
    assert rules.resized(samples_per_mb=4) == expected
    assert rules.resized(max_tokens_per_mb=128, overlong="drop").n_mbs is None
    with pytest.raises(ValueError, match="max_tokens_per_mb"):
        rules.resized(max_tokens_per_mb=0)
    with pytest.raises(ValueError, match="samples_per_mb = 3 with granularity = 2"):
        rules.resized(samples_per_mb=3, granularity=2)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"target_modules": ["v_proj", "q_proj"]}, {"target_modules": ("q_proj", "v_proj")}),
        ({"target_modules": "all-linear", "use_rslora": True}, {"rslora": True}),
        ({"target_modules": r".*\.down_proj"}, {"target_modules": r".*\.down_proj"}),
    ],
)
def test_adapter_of_peft_is_described(written: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    LoraConfig(r=4, lora_alpha=12, **written).save_pretrained(tmp_path)
    found = LoRAConfig.from_peft(tmp_path)
    if isinstance(found.target_modules, tuple):  # peft writes a set
        found = found.model_copy(update={"target_modules": tuple(sorted(found.target_modules))})
    assert found == LoRAConfig(rank=4, alpha=12, **expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        (json.dumps({"peft_type": "IA3", "target_modules": ["q_proj"]}), "KeyError: 'r'"),
        (json.dumps({"r": 0, "lora_alpha": 12, "target_modules": ["q_proj"]}), "rank"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"adapter_config\.json does not describe a LoRA adapter: .*") as refused:
        LoRAConfig.from_peft(tmp_path)
    assert message in str(refused.value)
