"""The model that every row trains: a Qwen3 with random weights, written as a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

HEAD = 32
"""Width of an attention head."""


@dataclass(frozen=True)
class Size:
    """How large the model is; heads are 32 wide, and two query heads share one of keys and values."""

    hidden: int = 256
    layers: int = 4
    vocabulary: int = 8192

    @property
    def matrix_parameters(self) -> int:
        """Parameters by which every token is multiplied: all matrices but the embedding."""
        attention = self.hidden * HEAD * (2 * self._heads + 2 * self._shared_heads)
        return self.layers * (attention + 3 * self.hidden * 4 * self.hidden) + self.hidden * self.vocabulary

    @property
    def _heads(self) -> int:
        return self.hidden // HEAD

    @property
    def _shared_heads(self) -> int:
        return max(1, self._heads // 2)

    def config(self) -> Qwen3Config:
        """The configuration that transformers builds it from."""
        if self.hidden % HEAD:
            raise ValueError(f"hidden = {self.hidden}: heads are {HEAD} wide; take a multiple of {HEAD}")
        return Qwen3Config(
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self._heads,
            num_key_value_heads=self._shared_heads,
            head_dim=HEAD,
            vocab_size=self.vocabulary,
            tie_word_embeddings=False,
            use_cache=False,  # with a cache, transformers lets packed sequences attend to each other
        )


def write_model(folder: Path, size: Size, seed: int = 0) -> None:
    """Write the model to ``folder``, in float32, unless it is there."""
    if (folder / "model.safetensors").exists():
        return
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(size.config()).save_pretrained(folder)
