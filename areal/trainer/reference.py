"""The model to stay near to: another engine, or the policy itself without its adapters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from areal.api import TrainEngine
from areal.trainer.checks import check_same_shards


def check_reference(engine: TrainEngine, reference: TrainEngine) -> None:
    """See that a reference can be one.

    Raises:
        ValueError: it is on another data-parallel layout, or it is the engine itself, which has no adapters.
    """
    check_same_shards(engine, reference)
    if reference is engine and engine.config.lora is None:
        raise ValueError("reference is the engine that is trained, without adapters: pass a second engine, or set lora")


def reference_logprobs(engine: TrainEngine, reference: TrainEngine, samples: list[Any]) -> Any:
    """Log-probs by the reference: where it is the engine itself, by its model without adapters."""
    with engine.reference() if reference is engine else nullcontext():
        return reference.forward_batch(samples)
