"""Layers of an adapter by kind, and initial factors that are the same on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from areal.api import LoRAConfig, ParallelDims
from areal.engine.lora.adapter_plan import layer_kind
from areal.engine.lora.adapter_set import peft_format
from areal.engine.model.tiny_config import shrink
from areal.tests.dist.checkpoint.lora_engines import logprobs, mine_of, of, scores, train
from areal.tests.grid.models import model_dir
from areal.tests.grid.recurrent_models import RECURRENT_FAMILIES
from areal.tests.harness.tiny import family_dir, layout, started
from areal.utils.seeding import mixed

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
EVERYTHING = ("attention", "mlp", "head")


def cases(*rows: tuple[str, Any, set[str]]) -> list[Any]:
    """Return the rows on each engine; on JAX, which compiles for each, the row with every kind."""
    engines = ("fsdp:d1", "megatron:d1")
    return [
        pytest.param(backend, *row)
        for row in rows
        for backend in ((*engines, "jax:d1") if row[1] == EVERYTHING else engines)
    ]


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("backend", "family", "kinds", "expected"),
    cases(
        ("qwen3", ("attention",), ATTENTION),
        ("qwen3", ("mlp",), MLP),
        ("qwen3", ("head",), {"lm_head"}),
        ("qwen3", ("mlp", "head"), MLP | {"lm_head"}),
        ("qwen3_tied", EVERYTHING, ATTENTION | MLP | {"lm_head"}),
        ("qwen3", None, ATTENTION | MLP),
        ("qwen3_moe", ("attention", "head"), ATTENTION | {"lm_head"}),
        ("deepseek_v3", ("attention",), LATENT),
    ),
)
def test_kinds_select_layers(backend: str, family: str, kinds: Any, expected: set[str]) -> None:
    with started(backend, path=family_dir(family), lora=LoRAConfig(rank=2, layer_kinds=kinds)) as engine:
        before = of(engine)
        layers = {name.removesuffix(".weight").rpartition(".lora_")[0] for name in before}
        assert {layer.rpartition(".")[2] for layer in layers} == expected
        # Every layer of the kind, and each is trained.
        n_layers = 2 * len(expected - {"lm_head"}) + ("lm_head" in expected)
        assert len(layers) == n_layers
        train(engine, 1, 2)
        assert not any(torch.equal(x, before[name]) for name, x in of(engine).items())


@pytest.mark.world(1)
def test_kinds_without_layers_are_refused() -> None:
    for family, kinds, message in (
        (
            "qwen3_moe",
            ("attention", "mlp"),
            r"lora.layer_kinds = \('attention', 'mlp'\): the experts .* leave 'mlp' out",
        ),
        ("deepseek_v3", ("mlp",), "experts of this model cannot have adapters"),
    ):
        with (
            pytest.raises(ValueError, match=message),
            started("fsdp:d1", path=family_dir(family), lora=LoRAConfig(layer_kinds=kinds)),
        ):
            pass


def test_kinds_that_share_names_are_told_apart() -> None:
    """In BERT, layers of both kinds are called ``dense``."""
    config = shrink(AutoConfig.for_model("bert", is_decoder=True))

    def names(*kinds: Any) -> list[str]:
        plan = peft_format().plan_adapter(config, LoRAConfig(layer_kinds=kinds))
        return sorted(target.key for target in plan.targets if ".layer.0." in target.key)

    attention = [
        f"bert.encoder.layer.0.attention.{name}" for name in ("output.dense", "self.key", "self.query", "self.value")
    ]
    assert names("attention") == attention
    assert names("mlp") == ["bert.encoder.layer.0.intermediate.dense", "bert.encoder.layer.0.output.dense"]


@pytest.mark.parametrize(("family", "expected"), [("recurrent_gemma", MLP), ("rwkv", {"key", "receptance", "value"})])
def test_gates_with_three_dimensions_are_no_experts(family: str, expected: set[str]) -> None:
    plans = [
        peft_format().plan_adapter(RECURRENT_FAMILIES[family](), lora)
        for lora in (LoRAConfig(rank=2, layer_kinds=("mlp",)), LoRAConfig(rank=2))
    ]
    of_kind, of_all = ({target.key.rpartition(".")[2] for target in plan.targets} for plan in plans)
    assert of_kind == expected
    assert expected <= of_all


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"init_lora_weights": start}, f"init_lora_weights = '{start}'.*changed weights of the model")
            for start in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga")
        ),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens = \[5, 6\].*every token"),
        ({"arrow_config": {}}, "arrow_config = .*every token"),
    ],
)
def test_adapters_of_another_forward_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """peft loads factors of a changed model, and factors for some tokens, under the names of plain ones."""
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]).to_dict()
    config = {name: sorted(x) if isinstance(x, set) else x for name, x in config.items()} | options
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"adapter_config.json: {message}"):
        peft_format().read_folder(tmp_path, shrink(AutoConfig.for_model("qwen3")), None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.self_attn.q_proj", "attention"),
        ("model.layers.11.linear_attn.in_proj_qkvz", "attention"),
        ("transformer.h.3.attn.attention.out_proj", "attention"),
        ("backbone.layers.2.mixer.in_proj", "attention"),
        ("model.layers.2.conv.out_proj", "attention"),
        ("backbone.layers.2.mixer.up_proj", "mlp"),
        ("model.layers.0.mlp.shared_expert.down_proj", "mlp"),
        ("transformer.h.1.mlp.c_fc", "mlp"),
        ("rwkv.blocks.3.feed_forward.key", "mlp"),
        ("rwkv.blocks.3.attention.key", "attention"),
    ],
)
def test_layer_kind(name: str, kind: str) -> None:
    assert layer_kind(name) == kind


# ---- initial factors

SEED, RANK = 20261123, 5
LAYOUTS = [
    *(
        pytest.param(backend, id=backend, marks=pytest.mark.world(ParallelDims.parse(backend).world_size))
        for backend in (
            *("fsdp:d1", "fsdp:d2", "fsdp:t2", "fsdp:p2", "fsdp:c2"),
            *("megatron:d1", "megatron:d2", "megatron:t2", "megatron:p2", "megatron:c2"),
        )
    ),
    *(layout(backend) for backend in ("jax:d1", "jax:d2", "jax:t2")),
]


def expected_down(name: str, inputs: int, seed: int) -> Tensor:
    """Return ``A`` as peft draws it: uniform with the bound of He et al. Written here once more, because layouts of one and of two
    ranks cannot be compared in one world."""
    layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    generator = torch.Generator().manual_seed(mixed(seed, layer))
    return torch.empty(RANK, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)


@pytest.mark.parametrize("backend", LAYOUTS)
def test_initial_factors_are_those_of_rank_and_seed_on_every_layout(backend: str) -> None:
    path = model_dir("qwen3_tied", vocab_size=115)
    lora = LoRAConfig(rank=RANK, layer_kinds=EVERYTHING)
    with started(backend, path=path, lora=lora, seed=SEED) as engine:
        engine.adapters.add("same", seed=SEED)
        engine.adapters.add("other", LoRAConfig(rank=RANK, layer_kinds=("attention",)), seed=SEED + 1)
        for adapter, seed, count in (("default", SEED, 15), ("same", SEED, 15), ("other", SEED + 1, 8)):
            engine.adapters.select(adapter)
            factors = of(engine)
            downs = {name: x for name, x in factors.items() if "lora_A" in name}
            assert len(downs) == len(factors) // 2 == count
            for key, x in downs.items():
                assert torch.equal(x.cpu(), expected_down(key, x.shape[1], seed)), key
            assert not any(x.any() for name, x in factors.items() if "lora_B" in name)


@pytest.mark.world(1)
def test_kinds_are_written_as_peft_names_them(tmp_path: Path) -> None:
    path = family_dir("qwen3")
    with started("fsdp:d1", path=path, lora=LoRAConfig(rank=2, layer_kinds=("attention", "head"))) as engine:
        train(engine, 1)
        engine.adapters.save("default", tmp_path / "adapter")
        expected = logprobs(engine)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert set(written) == ATTENTION | {"lm_head"}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), str(tmp_path / "adapter")).eval()
    for sample, row in zip(mine_of("fsdp:d1"), expected, strict=True):
        assert (scores(model, sample) - row).abs().max() < 2e-5
