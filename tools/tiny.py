"""A tiny model with random weights and a real tokenizer, to try a script within a minute.

python tools/smollm.py runs/SmolLM2-135M-Instruct
python tools/tiny.py runs/tiny --tokenizer runs/SmolLM2-135M-Instruct
"""

from __future__ import annotations

from pathlib import Path

import torch
import tyro
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def write_tiny(path: Path, /, tokenizer: str = "runs/SmolLM2-135M-Instruct", seed: int = 0) -> None:
    """Write a Llama of two layers of width 64.

    Args:
        path: directory to write.
        tokenizer: directory or hub name of a model with the tokenizer.
        seed: seed of the weights.
    """
    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words.save_pretrained(path)


if __name__ == "__main__":
    tyro.cli(write_tiny, description=__doc__)
