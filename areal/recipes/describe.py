"""What a run would do, for `--dry-run`: its settings, layout, memory, and the first row as the model sees it."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from areal.api import TrainEngineConfig
from areal.engine.model.hub import read_config
from areal.recipes.record.secrets import public_settings
from areal.recipes.run import Run

_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def description(run: Run[Any]) -> str:
    """Return a text of several lines. No engine is made."""
    config = run.config
    return "\n".join(
        (
            json.dumps(public_settings(config, changed_only=True), indent=2),
            f"{config.backend}: {config.engine_config().dims.world_size} ranks, {config.compute_dtype}",
            memory(config.engine_config()),
            "first row, with trained tokens in [[ ]]:",
            rendered(run),
        )
    )


def memory(config: TrainEngineConfig) -> str:
    """Return a sentence about the bytes of weights, gradients and AdamW's moments. Activations are not included."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(config.path))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = config.optimizer is not None and config.lora is None
    stored = _BYTES[config.master_dtype]
    # Gradients of the reduce dtype, and two moments of the stored dtype.
    per_parameter = stored + (_BYTES[config.grad_reduce_dtype] + 2 * stored if trained else 0)
    total, ranks = parameters * per_parameter / 2**30, config.dims.world_size
    return (
        f"{parameters:,} parameters: weights, gradients and optimizer state take {total:.2f} GiB in all, {total / ranks:.2f} GiB on each of "
        f"{ranks} ranks where they are sharded evenly; activations come on top"
    )


def rendered(run: Run[Any]) -> str:
    """Return the text of the first row, with trained parts in double brackets."""
    parts = []
    for segment in run.first_sample():
        text = str(run.tokenizer.decode(list(segment.tokens)))
        parts.append(f"[[{text}]]" if segment.trainable else text)
    return "".join(parts)
