"""Hugging Face models under packed attention compared with one sequence at a time, and the choice of models to pack."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from areal.api import ParallelDims
from areal.engine.attention.context_parallel import AttentionLayout, ContextParallel, choose_mode
from areal.engine.attention.huggingface import PACKED_ATTENTION
from areal.engine.attention.token_stream import TokenStream
from areal.engine.model.forward_plan import TESTED_FAMILIES, inspect_model, plan_forward
from areal.engine.model.probe import ProbeResult, probe
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.vision_models import VISION_FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
WINDOWED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")},
    **{"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen2_window": lambda: Qwen2Config(**SIZES, use_sliding_window=True, **WINDOWED),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES),
    "gemma3_text": lambda: Gemma3TextConfig(**SIZES, **WINDOWED),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=16),
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT, **EXPERTS),
    "gpt_oss": lambda: GptOssConfig(**SIZES, **EXPERTS, **WINDOWED, num_local_experts=4),
}
LENGTHS = (5, 1, 9, 2)
PADDED = 20


def build(config: PretrainedConfig, implementation: str) -> PreTrainedModel:
    """Build a float64 model in training mode, with the same weights for each implementation."""
    torch.manual_seed(0)
    # Copy the config: building a model writes the implementation into it.
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=implementation, experts_implementation="eager", dtype=torch.float64
    )
    return model.train()


def tokens(seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (n,), generator=rng) for n in LENGTHS]


def run_packed(model: PreTrainedModel, sequences: list[Tensor], layout: AttentionLayout | None = None) -> Tensor:
    ids = torch.nn.functional.pad(torch.cat(sequences), (0, PADDED - sum(LENGTHS)))
    layout = layout or ContextParallel(None).layout(TokenStream.of(LENGTHS, PADDED))
    positions = TokenStream.of(LENGTHS, PADDED).positions()
    logits = model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False, packed=layout
    ).logits
    return logits[0, : sum(LENGTHS)]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_sequence_at_a_time(family: str, checkpointing: bool) -> None:
    config = FAMILIES[family]()
    # Stock eager attention rounds its softmax to float32 in all families except this one, which only has eager
    # attention.
    stock = build(config, "eager" if family == "gpt_oss" else "sdpa")
    model = build(config, PACKED_ATTENTION)
    assert model.config._attn_implementation == PACKED_ATTENTION
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = torch.cat([stock(input_ids=ids[None], use_cache=False).logits[0] for ids in tokens()])
    out = run_packed(model, tokens())
    up = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    out.backward(up)
    expected.backward(up)
    # Norms and rotary embeddings round to float32 inside both models; the results differ only by the last bits of the
    # inputs.
    assert (out - expected).abs().max() <= 1e-6 * expected.abs().max()
    largest = max(p.grad.abs().max().item() for p in stock.parameters() if p.grad is not None)
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-6 * largest, name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_leak_between_sequences_or_from_padding(family: str) -> None:
    model = build(FAMILIES[family](), PACKED_ATTENTION)
    before, after = tokens(), tokens()
    after[2] = (after[2] + 1) % 64
    out, other = (run_packed(model, sequences).split(LENGTHS) for sequences in (before, after))
    for i in (0, 1, 3):
        assert torch.equal(out[i], other[i])
    assert not torch.equal(out[2], other[2])


def test_list_of_tested_families_is_complete() -> None:
    known = {config().model_type for config in FAMILIES.values()} | VISION_FAMILIES.keys()
    assert known == TESTED_FAMILIES


def test_forward_without_layout_or_with_mask_raises() -> None:
    model = build(FAMILIES["llama"](), PACKED_ATTENTION)
    ids = torch.ones(1, 4, dtype=torch.long)
    layout = ContextParallel(None).layout(TokenStream.of((4,), 4))
    with pytest.raises(ValueError, match="packed=AttentionLayout"):
        model(input_ids=ids, use_cache=False)
    with pytest.raises(ValueError, match="2 rows"):
        model(input_ids=ids.expand(2, -1), use_cache=False, packed=layout)
    with pytest.raises(ValueError, match="pass attention_mask=None"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 4, 4), use_cache=False, packed=layout)
    with pytest.raises(ValueError, match="does not know position_bias"):
        model(input_ids=ids, use_cache=False, packed=layout, position_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="share of the layout is 4"):
        model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False, packed=layout)


def test_dropout_and_bidirectional_attention_raise_in_forward() -> None:
    config = FAMILIES["llama"]()
    config.attention_dropout = 0.1
    model = build(config, PACKED_ATTENTION)
    call = {
        "input_ids": torch.ones(1, 4, dtype=torch.long),
        "use_cache": False,
        "packed": ContextParallel(None).layout(TokenStream.of((4,), 4)),
    }
    with pytest.raises(ValueError, match=r"attention_dropout = 0\.1"):
        model(**call)
    model.eval()(**call)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match="is_causal = False"):
        model(**call)


# ---- models that are packed


def small(model_type: str, **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **fields)


def layout(cp: int) -> ParallelDims:
    return ParallelDims.parse(f"fsdp:c{cp}")


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "olmo3", "glm4_moe", "deepseek_v3", "cohere2", "gpt_neox"])
def test_unknown_families_without_leaks_are_packed(model_type: str) -> None:
    assert inspect_model(small(model_type)) == (None, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_probe_agrees_with_known_families(family: str) -> None:
    result = probe(FAMILIES[family](), PACKED_ATTENTION)
    assert result == ProbeResult()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (small("bloom"), "differ by"),
        (small("stablelm"), "needs packed=AttentionLayout"),
        (small("seed_oss"), r"attention_dropout = 0\.1"),
    ],
    ids=lambda x: getattr(x, "model_type", None),
)
def test_models_with_leaks_are_not_packed(config: PretrainedConfig, reason: str) -> None:
    assert re.search(reason, inspect_model(config)[0])


def test_probe_works_where_models_are_entirely_in_float64() -> None:
    with float64_everywhere():
        assert inspect_model(small("mistral")) == (None, False)


def test_unpacked_model_runs_one_sequence_per_row(caplog: pytest.LogCaptureFixture) -> None:
    config = small("gpt2")
    with caplog.at_level(logging.WARNING):
        assert not plan_forward(config, "auto", layout(1)).packed
    (record,) = [r for r in caplog.records if r.name == "areal.engine.model.forward_plan"]
    assert "gpt2" in record.getMessage()
    with pytest.raises(ValueError, match=r"would mix sequences: attn_pdrop = 0\.1"):
        plan_forward(config, "packed", layout(1))
    with pytest.raises(ValueError, match=r"needs packed attention, but attn_pdrop = 0\.1"):
        plan_forward(config, "auto", layout(2))


def test_probe_detects_leak_in_an_unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("bloom")
    result = probe(config, PACKED_ATTENTION)
    assert "differ by" in result.packed
    assert result == ProbeResult(packed=result.packed)
    window = small("mistral", sliding_window=4096)
    monkeypatch.setattr(AttentionLayout, "attend", _without_window(AttentionLayout.attend))
    assert "differ by" in probe(window, PACKED_ATTENTION).packed


def _without_window(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **options: attend(*args[:-1], dataclasses.replace(args[-1], window=None), **options)


def test_probe_keeps_random_state() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    probe(FAMILIES["llama"](), PACKED_ATTENTION)
    assert torch.equal(torch.get_rng_state(), state)


def test_unsupported_models_raise() -> None:
    with pytest.raises(ValueError, match="encoder-decoder"):
        inspect_model(small("bart"))
    with pytest.raises(ValueError, match="after a later token changed"):
        inspect_model(small("bert"))
    with pytest.raises(ValueError, match=r"layerdrop = 0.5: every rank would skip other layers"):
        inspect_model(small("opt", layerdrop=0.5))
    config = FAMILIES["gemma3_text"]()
    config.use_bidirectional_attention = True
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        plan_forward(config, "rows", layout(1))


def test_requested_attention_is_used() -> None:
    config = FAMILIES["llama"]()
    assert plan_forward(config, "auto", layout(4)).packed
    assert plan_forward(config, "packed", layout(1)).packed
    assert not plan_forward(config, "rows", layout(1)).packed
    with pytest.raises(ValueError, match="'rows' was asked for"):
        plan_forward(config, "rows", layout(2))


# ---- context parallelism that needs no ranks


def test_choose_mode() -> None:
    assert choose_mode("auto", 4, 8, 2) == "ulysses"
    assert choose_mode("auto", 2, 9, 3) == "gather_kv"
    assert choose_mode("gather_kv", 2, 8, 8) == "gather_kv"
    assert choose_mode("ulysses", 4, 4, 1) == "ulysses"
    with pytest.raises(ValueError, match="9 query heads over 2"):
        choose_mode("ulysses", 2, 9, 3)
    with pytest.raises(ValueError, match="do not group over 3"):
        choose_mode("auto", 2, 8, 3)
    with pytest.raises(ValueError, match="'ring'"):
        choose_mode("ring", 2, 8, 4)


def test_context_parallel_size_1_uses_no_collective() -> None:
    cp = ContextParallel(None)
    assert (cp.size, cp.rank, cp.align) == (1, 0, 1)
    x = torch.randn(7, 2, requires_grad=True)
    assert cp.shard(x) is x
    cp.gather(x, 5).sum().backward()
    assert x.grad.sum(1).tolist() == [2.0] * 5 + [0.0] * 2
    layout = cp.layout(TokenStream.of((3, 2), 7))
    assert layout.stream.lengths == (3, 2, 2)
    assert TokenStream.of((3, 2), 7).positions().tolist() == [0, 1, 2, 0, 1, 0, 1]
