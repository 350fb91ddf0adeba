"""Shapes of the Qwen3 family, and the cost of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import Qwen3Config


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen3; :data:`SHAPES` contains the published ones."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151936
    tied: bool = True

    @property
    def matrix_parameters(self) -> int:
        """Parameters that every token is multiplied by: all matrices including the output head, without the embedding."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary

    def step_flop(self, lengths: Sequence[int]) -> float:
        """Return the floating-point operations of a forward and a backward over sequences of these lengths, without recomputation.

        Six per parameter and token. In attention a token sees half of its sequence: two products forward, four backward,
        of two operations for each key and column of a head (Kaplan et al., 2020; causal).
        """
        pairs = sum(length**2 / 2 for length in lengths)
        attention = 12 * self.layers * self.heads * self.head_dim * pairs
        return 6.0 * self.matrix_parameters * sum(lengths) + attention

    def config(self) -> Qwen3Config:
        """Return the transformers configuration."""
        return Qwen3Config(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            use_cache=False,  # with a cache, transformers lets packed sequences attend to each other
        )

    def write(self, folder: Path) -> str:
        """Write ``config.json`` without weights: engines draw random ones. Returns the folder."""
        config = self.config()
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        return str(folder)


SHAPES = {
    "0.6B": Shape(1024, 3072, 28, 16, 8),
    "1.7B": Shape(2048, 6144, 28, 16, 8),
    "8B": Shape(4096, 12288, 36, 32, 8, tied=False),
    "tiny": Shape(64, 128, 2, 4, 2, 16, 512),
}
"""Shapes by name; ``tiny`` is for trying the command out."""
