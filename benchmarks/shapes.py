"""Models of the Qwen3 family by their shapes, and what a step of them costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import Qwen3Config


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen3; the published ones stand in :data:`SHAPES`."""

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
        """Parameters by which every token is multiplied: all matrices, the output head among them, but not the embedding."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary

    def step_flop(self, lengths: Sequence[int]) -> float:
        """Floating-point operations of a forward and a backward over sequences of these lengths; what is recomputed does not count.

        Six for each parameter and token. In attention a token sees half of its sequence: two products forward, four backward,
        of two operations for each key and column of a head (Kaplan et al., 2020; causal).
        """
        pairs = sum(length**2 / 2 for length in lengths)
        attention = 12 * self.layers * self.heads * self.head_dim * pairs
        return 6.0 * self.matrix_parameters * sum(lengths) + attention

    def config(self) -> Qwen3Config:
        """The configuration that transformers builds it from."""
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
        """Write ``config.json``, and no weights: engines begin with random ones. Returns the folder."""
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
"""By name; ``tiny`` is for trying the command out."""
