"""A new option of an engine: its field in the configuration, and the code that reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.api import FinetuneSpec, TrainEngineConfig
from areal.engine.registry import create_engine
from areal.tests.dist.option_rows import differ, leaves, naming_the_declaration, no_effect, rows_to_edit
from areal.tests.grid.models import model_dir
from areal.tests.harness.world import one_rank
from areal.tests.unit.patches.patching import Patch

SECTION, ENGINE = "areal/api/sections/fsdp.py", "areal/engine/fsdp/engine.py"
OPTION = "fsdp.weight_scale"
PATCH = Patch(
    {
        SECTION: {
            'compile_backend: str = Field(default="inductor", description="Backend of torch.compile, by name.")': (
                '    weight_scale: float = Field(default=1.0, gt=0, description="Factor of the initial weights.")\n'
            )
        },
        # Not edited, but executed again: it has the section as a field.
        "areal/api/config.py": {},
        ENGINE: {
            "load_weights(chunks, config.path, device, self.device)": (
                "        for parameter in chunks.parameters():\n"
                "            local_part(parameter.detach()).mul_(config.fsdp.weight_scale)\n"
            )
        },
    }
)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def weights(**fsdp: Any) -> list[Any]:
    """Return the sums of the weights of an engine, made from the configuration that the library has now."""
    config = sys.modules["areal.api.config"].TrainEngineConfig(path=model_dir("qwen3"), dtype="float32", fsdp=fsdp)
    with create_engine(config) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=1))
        return [tensor.double().abs().sum().item() for _, tensor in engine.named_tensors()]


def test_an_option_needs_two_source_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights()
    PATCH.apply(tmp_path, monkeypatch)
    assert weights(weight_scale=2.0) == pytest.approx([2 * each for each in plain])
    with pytest.raises(ValueError, match="weight_scale"):
        weights(weight_scale=-1.0)
    assert sum(map(bool, PATCH.files.values())) <= 2


def test_an_option_without_a_row_or_without_an_effect_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(leaves(TrainEngineConfig))
    plain = weights()
    PATCH.without(ENGINE).apply(tmp_path, monkeypatch)
    patched = sys.modules["areal.api.config"].TrainEngineConfig
    assert rows_to_edit(rows, patched) == [
        f"{OPTION}: add its row to OPTIONS in areal/tests/dist/test_options.py, which shows its effect"
    ]
    assert not differ(weights(weight_scale=2.0), plain)
    assert ENGINE in no_effect("fsdp", OPTION)


def test_an_option_without_a_field_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PATCH.without(SECTION).apply(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="'FSDPConfig' object has no attribute 'weight_scale'"):
        weights()


def test_an_option_outside_of_sections_has_to_be_declared() -> None:
    config = TrainEngineConfig(path=model_dir("qwen3"), backend="jax:d1", grad_sync="micro_batch")
    with pytest.raises(ValueError, match="does not support") as caught, naming_the_declaration("jax", "grad_sync"):
        create_engine(config)
    (note,) = caught.value.__notes__
    assert "grad_sync: add it to supported_options in areal/engine/jax/engine.py" in note
