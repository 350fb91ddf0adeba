"""Facts about the base model: its context length, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from areal.api import TrainEngine
from areal.engine.model.hub import max_positions, model_folder, read_config

_SAMPLED_BYTES = 4096

_DTYPES: dict[Any, Literal["bfloat16", "float32", "float64"]] = {
    None: "float32",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""Dtype of an engine by that of a configuration; bfloat16 for all others."""


@dataclass(frozen=True)
class BaseModel:
    """The base model of a backend.

    Attributes:
        name: directory or hub name.
        fingerprint: hash of its weights: of the name, dtype and shape of each tensor, and of some of its values.
        context: context length, or ``None`` if its configuration states none.
        dtype: dtype of an engine for the weights as they are in the files; bfloat16 for those in float16.
    """

    name: str
    fingerprint: str
    context: int | None
    dtype: Literal["bfloat16", "float32", "float64"]

    def max_tokens(self, limit: int | None) -> int:
        """Return the most tokens of one sample: the limit of the operator, or else the context length of the model.

        Raises:
            ValueError: the limit exceeds the context length, or there is neither.
        """
        if limit is not None and self.context is not None and limit > self.context:
            raise ValueError(
                f"backend_config.max_tokens = {limit}: the model has a context of {self.context} tokens: lower it, or leave it out"
            )
        length = limit or self.context
        if length is None:
            raise ValueError(
                f"backend_config.max_tokens = None: the configuration of {self.name} states no context length: set it"
            )
        return length


def find_base_model(name: str) -> BaseModel:
    """Find a base model, which may download it.

    Raises:
        ValueError: there is no such model.
    """
    folder = model_folder(name)
    config = read_config(str(folder))
    tensors: dict[str, bytes] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= _sampled_tensors(file)
    # By name, so that the division into files does not matter.
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(tensors[key])
    return BaseModel(name, digest.hexdigest(), max_positions(config), _DTYPES.get(config.dtype, "bfloat16"))


def _sampled_tensors(file: Path) -> dict[str, bytes]:
    """Return, for each tensor of a file, its name, dtype and shape, with bytes from the middle of its values."""
    sampled = {}
    with open(file, "rb") as stream:
        # The format: length of the header, the header in JSON, and the values.
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            stream.seek(8 + length + max(begin, (begin + end - _SAMPLED_BYTES) // 2))
            values = stream.read(min(_SAMPLED_BYTES, end - begin))
            sampled[name] = f"{name} {entry['dtype']} {entry['shape']}".encode() + values
    return sampled


def whole_parameters(engine: TrainEngine, _: Any) -> Mapping[str, Tensor]:
    """Return the base model's parameters by their names in transformers; none from an engine that holds them in another form."""
    whole: Callable[[], Mapping[str, Tensor]] = getattr(engine, "whole_parameters", dict)
    return whole()
