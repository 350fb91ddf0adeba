"""A tiny model with a tokenizer of characters, and rows, for runs of recipes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal.tests.harness.recipes.character_tokenizer import character_tokenizer
from areal.tests.harness.tiny import writing
from areal.tests.harness.world import locked, world

SETTINGS: dict[str, Any] = {"dtype": "float32", "lr": 3e-3, "trackers": ("jsonl",), "max_tokens_per_mb": 512}
"""Settings of all small runs."""


def save_model(path: Path, **sizes: float) -> None:
    """Write a Llama of two layers and its tokenizer of characters, with a chat template."""
    words = character_tokenizer()
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
    }
    config = LlamaConfig(vocab_size=len(words), **{**fields, **sizes})
    # On whichever rank is first.
    with writing():
        LlamaForCausalLM(config).save_pretrained(path)
        words.save_pretrained(path)


def recipe_model(context: int = 256) -> str:
    """Return the directory of a Llama of two layers, with a chat template."""
    path = Path(world().cache) / f"recipe-model-{context}"
    with locked(path):
        if not path.exists():
            partial = path.with_suffix(".partial")
            save_model(partial, num_key_value_heads=2, max_position_embeddings=context)
            partial.rename(path)
    return str(path)


def recipe_model_with_experts() -> str:
    """Return the directory of a Qwen3 of two layers with four experts, with a chat template."""
    path = Path(world().cache) / "recipe-model-experts"
    with locked(path):
        if not path.exists():
            words = character_tokenizer()
            torch.manual_seed(0)
            config = Qwen3MoeConfig(
                vocab_size=len(words),
                hidden_size=64,
                moe_intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=64,  # vLLM's attention has it on a CPU
                num_experts=4,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                max_position_embeddings=512,
                bos_token_id=words.bos_token_id,
                eos_token_id=words.eos_token_id,
            )
            partial = path.with_suffix(".partial")
            with writing():
                Qwen3MoeForCausalLM(config).save_pretrained(partial)
                words.save_pretrained(partial)
            partial.rename(path)
    return str(path)


def rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return questions whose answer is the last character of a word."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcd", k=3)) for _ in range(number)]
    return [{"prompt": f"last of {word}?", "answer": word[-1]} for word in words]


def reward(row: dict[str, Any], answer: str) -> float:
    """Return the share of characters of an answer that are letters before ``n``: a tiny model learns it in a few steps."""
    return sum("a" <= character < "n" for character in answer) / max(1, len(answer))
