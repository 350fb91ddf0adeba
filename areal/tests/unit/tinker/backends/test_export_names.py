"""Exported adapters: names and configuration of the hosted service, and loaded back under them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal.engine.lora.peft_format import rename_head
from areal.tests.grid.models import model_dir
from areal.tests.unit.tinker.backends.conftest import Start
from areal.tests.unit.tinker.backends.reference import data, request, run, trained, weights
from areal.tinker.backends.training.engine_backend import EngineBackend

PREFIX = "base_model.model."
HEAD = (f"{PREFIX}lm_head.", f"{PREFIX}model.unembed_tokens.")


def exported(backend: EngineBackend, folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Export the model ``a``. Returns its weights, and its target modules."""
    backend.save_external("a", folder)
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert list(folder.parent.iterdir()) == [folder]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32, "LORA")
    return load_file(folder / "adapter_model.safetensors"), config["target_modules"]


def test_head_has_the_name_of_the_service(backend: EngineBackend, tmp_path: Path) -> None:
    trained(backend, "a")
    own = weights(backend, "a")
    given, targets = exported(backend, tmp_path / "exported")
    assert "unembed_tokens" in targets
    assert "lm_head" not in targets
    assert {name.replace(*HEAD) for name in own} == set(given)
    assert all(torch.equal(given[name.replace(*HEAD)], x) for name, x in own.items())
    # An engine and a rollout read either name.
    backend.group.adapters.load("back", str(tmp_path / "exported"))
    backend.group.adapters.select("back")
    back = dict(backend.group.adapters.named_tensors())
    backend._select("default")
    backend.group.adapters.select("default")
    backend.group.adapters.remove("back")
    assert back.keys() == own.keys()
    assert all(torch.equal(back[name], x) for name, x in own.items())


def test_tied_head_keeps_its_name(start: Start, tmp_path: Path) -> None:
    """The cookbook would merge ``model.unembed_tokens`` into the input embedding too. It refuses ``lm_head``, unless the base is untied."""
    backend = start(model=model_dir("qwen3_tied"))
    trained(backend, "a")
    given, targets = exported(backend, tmp_path / "exported")
    assert "lm_head" in targets
    assert given.keys() == weights(backend, "a").keys()


def test_adapter_without_a_head_is_exported_as_it_is(backend: EngineBackend, tmp_path: Path) -> None:
    trained(backend, "a", head=False)
    given, targets = exported(backend, tmp_path / "exported")
    assert given.keys() == weights(backend, "a").keys()
    assert not {"lm_head", "unembed_tokens"} & set(targets)
    assert run(backend, request("a", data("weights")))


@pytest.mark.parametrize(
    ("targets", "renamed"), [(["q_proj", "embed_out"], ["q_proj", "unembed_tokens"]), (".*", ".*")]
)
def test_names_are_changed_where_the_head_is(targets: str | list[str], renamed: str | list[str]) -> None:
    config, named = rename_head(
        {"target_modules": targets, "r": 4},
        {f"{PREFIX}embed_out.lora_A.weight": 1, f"{PREFIX}model.embed_out_proj.lora_A.weight": 2},
        "embed_out",
        "model.unembed_tokens",
    )
    assert config == {"target_modules": renamed, "r": 4}
    assert named == {
        f"{PREFIX}model.unembed_tokens.lora_A.weight": 1,
        f"{PREFIX}model.embed_out_proj.lora_A.weight": 2,
    }
