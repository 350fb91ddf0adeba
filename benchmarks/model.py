"""The model that every row trains: a Qwen3 with random weights, written as a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.shapes import Shape

HEAD = 32
"""Width of an attention head."""


@dataclass(frozen=True)
class Size:
    """Size of the model. Heads are 32 wide, and each key-value head serves two query heads."""

    hidden: int = 256
    layers: int = 4
    vocabulary: int = 8192

    @property
    def shape(self) -> Shape:
        """All dimensions of the model."""
        if self.hidden % HEAD:
            raise ValueError(f"hidden = {self.hidden}: heads are {HEAD} wide; take a multiple of {HEAD}")
        heads = self.hidden // HEAD
        return Shape(
            self.hidden, 4 * self.hidden, self.layers, heads, max(1, heads // 2), HEAD, self.vocabulary, tied=False
        )

    @property
    def matrix_parameters(self) -> int:
        """See :class:`~benchmarks.shapes.Shape`."""
        return self.shape.matrix_parameters


def write_model(folder: Path, size: Size, seed: int = 0) -> None:
    """Write the model to ``folder`` in float32, unless it exists."""
    if (folder / "model.safetensors").exists():
        return
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(size.shape.config()).save_pretrained(folder)
