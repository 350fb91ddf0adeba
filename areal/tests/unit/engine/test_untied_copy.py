"""A copy with separate weights of embedding and head computes the same, and is what an adapter of the head is merged into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api import LoRAConfig
from areal.cli.untie import run_untie
from areal.engine.model.media import model_factory
from areal.engine.model.untied_copy import write_untied_copy
from areal.tests.grid.models import adapter_dir, model_dir
from areal.tests.grid.vision_models import VISION_FAMILIES


def logprobs(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits[0].log_softmax(-1)


def read(path: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_copy_has_the_same_logits_and_two_weights(tmp_path: Path) -> None:
    base = model_dir("smollm")
    # In one file, and in several.
    read(base).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    for source in (base, str(tmp_path / "sharded")):
        folder = tmp_path / "copies" / Path(source).name
        assert run_untie([source, str(folder)]) == 0
        copy = read(folder)
        assert copy.get_output_embeddings().weight is not copy.get_input_embeddings().weight
        assert torch.equal(logprobs(copy), logprobs(read(base)))
        assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        with pytest.raises(SystemExit, match=r"areal untie: folder = .* exists: remove it"):
            run_untie([source, str(folder)])


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen2_vl"])
def test_names_on_disk_differ_from_those_in_memory(family: str, tmp_path: Path) -> None:
    config = VISION_FAMILIES[family](tie_word_embeddings=True)
    torch.manual_seed(0)
    base = model_factory(config).from_config(config, dtype=torch.float32).eval()
    base.save_pretrained(tmp_path / "base")
    write_untied_copy(str(tmp_path / "base"), tmp_path / "copy")
    copy = model_factory(config).from_pretrained(tmp_path / "copy", dtype=torch.float32).eval()
    assert copy.get_output_embeddings().weight is not copy.get_input_embeddings().weight
    assert torch.equal(logprobs(copy), logprobs(base))


def test_models_that_are_not_tied_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"embeddings are not tied: use the model as it is"):
        write_untied_copy(model_dir("qwen3"), tmp_path / "copy")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapter_of_the_head_is_merged_into_the_copy(tmp_path: Path) -> None:
    """peft merges it into the input embedding of the tied model too, without an error: docs/lora.md says so."""
    base = model_dir("qwen3_tied")
    adapter = adapter_dir(base, LoRAConfig(rank=3, alpha=6.0), head=True)
    write_untied_copy(base, tmp_path / "copy")
    expected = logprobs(PeftModel.from_pretrained(read(base), adapter))
    merged, wrong = (
        PeftModel.from_pretrained(read(path), adapter).merge_and_unload() for path in (tmp_path / "copy", base)
    )
    assert (logprobs(merged) - expected).abs().max() < 1e-4
    assert (logprobs(wrong) - expected).abs().max() > 1e-2
