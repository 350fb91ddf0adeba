"""Bytes that a forward keeps per token and layer, as ``docs/precision-and-memory.md`` states them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.huggingface import PACKED_ATTENTION
from areal.engine.attention.token_stream import TokenStream
from areal.engine.model.fused_layers import fuse_layers

TOKENS = 64
SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
PAGE = Path(__file__).parents[4] / "docs" / "precision-and-memory.md"


def saved_bytes(layers: int, *, fused: bool) -> int:
    """Return the bytes of the distinct tensors that the decoder keeps, weights excepted.

    Args:
        layers: number of layers.
        fused: replace the layers' operations as the FSDP engine does.
    """
    config = LlamaConfig(vocab_size=8, num_hidden_layers=layers, head_dim=64, **SMOL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    if fused:
        fuse_layers(model, "llama")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    packed = ContextParallel(None).layout(TokenStream.of((TOKENS,), TOKENS), "cpu")
    ids, positions = torch.zeros(1, TOKENS, dtype=torch.long), torch.arange(TOKENS)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = model.model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, packed=packed)
    assert out.last_hidden_state.requires_grad
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "transformers"])
def test_layer_keeps_what_the_page_says(fused: bool) -> None:
    hidden, inner, heads, queries, keys = 576, 1536, 9, 9 * 64, 3 * 64
    rows = {
        "norms": (4 if fused else 6) * hidden + 2,
        "attention": 2 * queries + 2 * keys + heads,
        "mlp": (3 if fused else 4) * inner,
    }
    per_token = (saved_bytes(3, fused=fused) - saved_bytes(1, fused=fused)) / 2 / TOKENS
    assert abs(per_token / (4 * sum(rows.values())) - 1) < 0.02
    page = PAGE.read_text()
    assert f" {4 * sum(rows.values()):,} bytes" in page
    assert f"{4 * sum(rows.values()) * 30 * 3840 / 1e9:.1f} GB" in page
    if fused:
        assert all(f"| {4 * n:,} bytes |" in page for n in rows.values())
