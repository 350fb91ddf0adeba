"""The matrices of models: what is orthogonalised, and parameters that are several matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AriaTextConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GptOssConfig,
    NemotronHConfig,
    Phi3Config,
)

from areal.api import MuonConfig
from areal.engine.torch.muon.matrices import WHOLE, Matrices, matrices_of
from areal.engine.torch.muon.newton_schulz import orthogonalised, update_scale
from areal.tests.grid.models import FAMILIES
from areal.tests.grid.muon_reference import orthogonal
from areal.tests.grid.recurrent_models import RECURRENT_FAMILIES
from areal.tests.grid.vision_models import VISION_FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def built(config: Any) -> tuple[Any, dict[str, Matrices]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, matrices_of(model, model.config)


def rows(kind: Matrices, shape: torch.Size) -> list[list[int]]:
    """Return the places of each matrix in the dimension that is divided."""
    assert kind.dim in (-1, -2)
    return [torch.arange(shape[kind.dim])[part].tolist() for part in kind.parts]


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (3, 8, 5)])
def test_iteration_changes_singular_values_alone(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    made = orthogonalised(x, MuonConfig(dtype="float64"))
    for one, own in zip(made.view(-1, *shape[-2:]), x.view(-1, *shape[-2:]), strict=True):
        torch.testing.assert_close(one, orthogonal(own, 5), rtol=0, atol=1e-12)
        assert 0.6 < torch.linalg.svdvals(one).min() <= torch.linalg.svdvals(one).max() < 1.3
    narrow = orthogonalised(x.float(), MuonConfig())
    assert narrow.dtype == torch.float32
    assert 1e-4 < (narrow - made).norm() / made.norm() < 0.1
    assert not orthogonalised(torch.zeros(shape), MuonConfig()).any()


def test_scales_are_of_the_shape_of_a_matrix() -> None:
    shape = (3, 64, 16)
    assert update_scale(shape, MuonConfig()) == pytest.approx(0.2 * 8)
    assert update_scale(shape, MuonConfig(scale="original")) == 2
    assert update_scale((3, 16, 64), MuonConfig(scale="original")) == 1


def test_parameters_that_are_several_matrices_are_cut_into_them() -> None:
    model, found = built(Phi3Config(**SIZES))
    layer = "model.layers.0."
    assert rows(found[f"{layer}self_attn.qkv_proj.weight"], torch.Size((64, 32))) == [
        [*range(32)],
        [*range(32, 48)],
        [*range(48, 64)],
    ]
    gate, up = rows(found[f"{layer}mlp.gate_up_proj.weight"], torch.Size((96, 32)))
    assert (gate, up) == ([*range(48)], [*range(48, 96)])
    # What is no matrix, or belongs to AdamW.
    assert set(found) == {
        f"{layer}{name}.weight"
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert {name for name, x in model.named_parameters() if x.dim() == 2} - set(found) == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }


def test_stacks_of_experts_are_cut_as_their_family_has_them() -> None:
    _, found = built(FAMILIES["qwen3_moe"]())
    name = next(name for name in found if name.endswith("gate_up_proj"))
    assert found[name].dim == -2
    config = GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    model, found = built(config)
    name = next(name for name in found if name.endswith("gate_up_proj"))
    # Gate and up alternate in the columns.
    shape = dict(model.named_parameters())[name].shape
    assert found[name].dim == -1
    assert rows(found[name], shape) == [[*range(0, 96, 2)], [*range(1, 96, 2)]]


@pytest.mark.parametrize(
    ("family", "layer", "sizes"),
    [
        ("lfm2", "conv.in_proj", "3"),
        ("nemotron_h", "mixer.in_proj", "5"),
        ("qwen3_5_text", "in_proj_qkv", "3"),
        ("qwen3_next", "in_proj_qkvz", "4"),
        ("qwen3_next", "in_proj_ba", "2"),
        ("falcon_mamba", "x_proj", "3"),
    ],
)
def test_projections_of_recurrent_layers_are_cut(family: str, layer: str, sizes: str) -> None:
    model, found = built(RECURRENT_FAMILIES[family]())
    names = [name for name in found if name.endswith(f"{layer}.weight")]
    assert names
    for name in names:
        shape = dict(model.named_parameters())[name].shape
        places = rows(found[name], shape)
        assert len(places) == int(sizes)
        # Each row once.
        assert sorted(row for part in places for row in part) == [*range(shape[0])]


def test_rows_of_key_heads_are_gathered_to_their_matrices() -> None:
    model, found = built(RECURRENT_FAMILIES["qwen3_next"]())
    name = next(name for name in found if name.endswith("in_proj_qkvz.weight"))
    module: Any = model.get_submodule(name.rpartition(".in_proj")[0])
    per_head = 2 * module.head_k_dim + 2 * module.num_v_heads // module.num_k_heads * module.head_v_dim
    queries = rows(found[name], dict(model.named_parameters())[name].shape)[0]
    assert queries == [per_head * h + i for h in range(module.num_k_heads) for i in range(module.head_k_dim)]


def test_parts_are_put_together_again() -> None:
    x = torch.arange(48.0).view(2, 6, 4)
    kinds = [
        Matrices(-2, (slice(0, 2), slice(2, 6))),
        Matrices(-1, (slice(0, 4, 2), slice(1, 4, 2))),
        Matrices(-2, (torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5]))),
    ]
    for kind in kinds:
        assert torch.equal(kind.join(kind.split(x), x), x)

    def twice(part: Tensor, number: int) -> Tensor:
        return part * number

    made = kinds[1].join([twice(part, n) for n, part in enumerate(kinds[1].split(x))], x)
    assert torch.equal(made, x * torch.tensor([0.0, 1, 0, 1]))


def test_towers_of_images_have_matrices() -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(VISION_FAMILIES["qwen2_5_vl"]())
    found = matrices_of(model, model.config)
    qkv = next(name for name in found if name.endswith("attn.qkv.weight"))
    assert len(found[qkv].parts) == 3
    assert not any("patch_embed" in name or "norm" in name for name in found)


def test_stacks_of_families_with_other_experts() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}
    _, found = built(AriaTextConfig(**SIZES, moe_num_experts=4, moe_topk=2))
    (gate, up) = rows(found["model.layers.0.mlp.experts.gate_up_proj"], torch.Size((4, 32, 96)))
    assert found["model.layers.0.mlp.experts.gate_up_proj"].dim == -1
    assert (gate, up) == ([*range(48)], [*range(48, 96)])
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    model, found = built(NemotronHConfig(**sizes, **experts, layers_block_type=["moe"]))
    stacks = [name for name, x in model.named_parameters() if x.dim() == 3]
    assert stacks
    assert all(found[name] == WHOLE for name in stacks)
