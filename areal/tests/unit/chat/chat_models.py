"""Tiny models of the tokenizers of single characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal.tests.unit.chat import templates
from areal.tests.unit.chat.tokenizers import chat_tokenizer


def chat_model(
    seed: int = 0, *, width: int = 32, spread: float = 0.02, vocabulary: int | None = None
) -> Qwen3ForCausalLM:
    """Return a Qwen3 of two layers with random weights.

    Args:
        seed: of the weights.
        width: of hidden states.
        spread: standard deviation of the weights.
        vocabulary: number of tokens; by default, of the tokenizer with the template ``CHATML``.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary or len(chat_tokenizer(templates.CHATML)),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=spread,
    )
    return Qwen3ForCausalLM(config).eval()


def write_chat_model(path: Path, tokens: Any = None, **options: Any) -> tuple[str, Any]:
    """Write a model and its tokenizer, by default that with the template ``CHATML``. Returns their folder and the tokenizer."""
    tokens = tokens or chat_tokenizer(templates.CHATML)
    chat_model(vocabulary=len(tokens), **options).save_pretrained(path)
    tokens.save_pretrained(path)
    return str(path), tokens
