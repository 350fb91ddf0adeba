"""A tiny model with random weights, its tokenizer, a data set and a deterministic reward function."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config

from areal import FinetuneSpec, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import TrainEngine
from areal.inference import LocalRollout

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 ?\n<>|_/"


def tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of single characters with the chat template of Qwen3."""
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *_LETTERS])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    characters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]})
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return made


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def write_model(path: Path, **sizes: Any) -> str:
    """Write a Qwen3 of two layers, and its tokenizer. ``sizes`` replace those of :data:`SIZES`."""
    tokens = tokenizer()
    config = Qwen3Config(
        **{**SIZES, **sizes},
        vocab_size=len(tokens),
        num_hidden_layers=2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    generator = torch.Generator().manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return str(path)


def data_set() -> Dataset:
    """Return 64 prompts, each with a letter."""
    numbers = random.Random(0)
    prompts = [[{"role": "user", "content": f"{numbers.randint(0, 99)} ab?"}] for _ in range(64)]
    return Dataset.from_dict({"prompt": prompts, "letter": [numbers.choice("abcd") for _ in prompts]})


def reward(completions: list[Any], letter: list[str], **_: Any) -> list[float]:
    """Return the number of early letters, of which one counts twice, less a price for the length."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        (sum(x in "abcdefgh" for x in text) + text.count(wanted)) / 8 - 0.01 * len(text)
        for text, wanted in zip(texts, letter, strict=True)
    ]


def local_rollout(path: str) -> LocalRollout:
    """Return a rollout engine with the model's weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
    return LocalRollout(model, max_context=128)


def engine(path: str, **changes: Any) -> TrainEngine:
    """Return an engine with the model's weights."""
    options = {"backend": "fsdp:d1", "dtype": "float32", "optimizer": OptimizerConfig(), **changes}
    made = create_engine(TrainEngineConfig(path=path, **options))
    made.initialize(FinetuneSpec(total_train_steps=1000))
    return made
