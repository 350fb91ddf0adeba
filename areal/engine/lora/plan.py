"""What an adapter consists of, before it has any values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A linear layer that gets an adapter.

    Attributes:
        key: the layer's name in the Hugging Face model.
        rank: of the product. scale: what it is multiplied by.
        inputs, outputs: features of the layer.
    """

    key: str
    rank: int
    scale: float
    inputs: int
    outputs: int

    @property
    def down(self) -> str:
        """Name of ``A`` in peft's files."""
        return f"base_model.model.{self.key}.lora_A.weight"

    @property
    def up(self) -> str:
        """Name of ``B`` in peft's files."""
        return f"base_model.model.{self.key}.lora_B.weight"


@dataclass(frozen=True)
class AdapterPlan:
    """The layers that get an adapter, in the order of the model, and the content of ``adapter_config.json``."""

    targets: tuple[Target, ...]
    config: Mapping[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, by peft's names."""
        found: dict[str, tuple[int, ...]] = {}
        for target in self.targets:
            found |= {target.down: (target.rank, target.inputs), target.up: (target.outputs, target.rank)}
        return found
