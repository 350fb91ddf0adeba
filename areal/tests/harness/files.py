"""Gradients under the names that a model's files have."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from areal.tests.harness.tiny import writing


def gradients_as_in_files(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients under the names that transformers writes: it saves a model whose weights they are."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for buffer in model.buffers():
        buffer.data = torch.full_like(buffer, torch.nan, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder, writing():
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    return {name: tensor for name, tensor in saved.items() if not tensor.isnan().all()}
