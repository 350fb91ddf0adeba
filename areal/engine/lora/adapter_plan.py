"""The layers and configuration of an adapter, without values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from areal.engine.model.vision import vision_parts

PREFIX = "base_model.model."
"""Prefix of layer names in peft's files."""


def decoder_linears(hf: PreTrainedModel) -> dict[str, Any]:
    """Return the linear layers of a model by name, without those of a vision tower and the output head.

    The weight of the head is used outside its own forward.
    """
    others = {hf.get_output_embeddings(), *(module for part in vision_parts(hf) for module in part.modules())}
    return {name: x for name, x in hf.named_modules() if isinstance(x, nn.Linear) and x not in others}


def head_name(hf: PreTrainedModel) -> str | None:
    """Return the name of the output head, or ``None`` if the head is not a linear layer."""
    head = hf.get_output_embeddings()
    return next((name for name, x in hf.named_modules() if x is head and isinstance(x, nn.Linear)), None)


FEED_FORWARD = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Last components of the names of feed-forward layers in most models."""

_TOKEN_MIXING = re.compile(r"attn|attention|mixer|mamba|rwkv|lstm|conv|temporal|recurrent|ssm|retention", re.IGNORECASE)


def layer_kind(name: str) -> Literal["attention", "mlp"]:
    """Return the kind of a decoder's linear layer: ``"attention"`` for one that mixes tokens, ``"mlp"`` for any other.

    Args:
        name: name of the layer, such as ``model.layers.0.self_attn.q_proj``.
    """
    # Names before the number of the layer are those of the model, which may be that of a kind.
    inside = re.sub(r"^.*?\.\d+\.", "", name).split(".")
    if inside[-1] in FEED_FORWARD:
        return "mlp"
    return "attention" if any(_TOKEN_MIXING.search(part) for part in inside) else "mlp"


@dataclass(frozen=True)
class Target:
    """A linear layer with an adapter.

    Attributes:
        key: name of the layer in the Hugging Face model.
        rank: rank of the product.
        scale: factor of the product.
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
        return f"{PREFIX}{self.key}.lora_A.weight"

    @property
    def up(self) -> str:
        """Name of ``B`` in peft's files."""
        return f"{PREFIX}{self.key}.lora_B.weight"


@dataclass(frozen=True)
class AdapterPlan:
    """The layers with an adapter, in the order of the model, and the content of ``adapter_config.json``."""

    targets: tuple[Target, ...]
    config: Mapping[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights, by peft's names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for target in self.targets:
            shapes |= {target.down: (target.rank, target.inputs), target.up: (target.outputs, target.rank)}
        return shapes
