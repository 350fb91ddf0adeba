"""Tiny models are suitable for comparisons: deterministic, non-trivial, with unambiguous routing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.models import FAMILIES, VOCAB, model_dir

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (1, n), generator=generator) for n in (40, 23, 7, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_have_non_trivial_logits_and_norms(family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float32, **EAGER)
    logits = torch.cat([model(ids, use_cache=False).logits[0] for ids in sequences()])
    assert 0.5 < logits.std() < 3
    for name, weight in model.named_parameters():
        assert weight.std() > 0.02, name


@pytest.mark.parametrize("family", FAMILIES)
def test_model_files_are_float32_and_depend_only_on_the_seed(family: str) -> None:
    first, again, other = (
        load_all(model_dir(family, seed=seed, **changes))
        for seed, changes in ((0, {}), (0, {"bos_token_id": 3}), (1, {}))
    )
    assert {weight.dtype for weight in first.values()} == {torch.float32}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first)


def test_model_files_include_shards_and_named_experts() -> None:
    assert len(list(Path(model_dir("llama")).glob("*.safetensors"))) > 2
    names = load_all(model_dir("qwen3_moe"))
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    assert "lm_head.weight" not in load_all(model_dir("qwen3_tied"))


def test_tiny_moe_routing_has_no_near_ties() -> None:
    with float64_everywhere(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(model_dir("qwen3_moe"), dtype=torch.float64, **EAGER)
        router_logits = [
            logits
            for ids in sequences()
            for logits in model(ids, use_cache=False, output_router_logits=True).router_logits
        ]
    ranked = torch.cat(router_logits).sort(-1, descending=True).values
    assert (ranked[:, 1] - ranked[:, 2]).min() > 1e-3


def load_all(path: str) -> dict[str, torch.Tensor]:
    return {name: weight for file in Path(path).glob("*.safetensors") for name, weight in load_file(file).items()}
