"""Results of an engine and of a group, compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.api import (
    MicroBatch,
    StepOutput,
    TokenOutputs,
)
from areal.engine.checkpoint.safetensors import TensorFiles
from areal.tests.harness.tiny import (
    loss,
    same_bits,
)
from areal.utils.dtensor import full_box


def untimed(step: StepOutput) -> StepOutput:
    return dataclasses.replace(step, seconds=0.0, timings={})


def same(a: Any, b: Any) -> bool:
    """Return True if two results are equal bit for bit."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same_bits({"": a}, {"": b})
    if isinstance(a, StepOutput):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def half_of_the_loss(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, Tensor]:
    return loss(outputs, mb.data) / 2, outputs.logprobs.detach()


class Counter:
    """State of the driver that does not pickle."""

    def __init__(self, count: int) -> None:
        self.count, self.lock = count, __import__("threading").Lock()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a model directory."""
    with TensorFiles.of_model(folder) as files:
        return {name: files.read(name, full_box(files.shape(name))) for name in files}
