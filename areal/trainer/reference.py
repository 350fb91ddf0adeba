"""Reference model of a policy: a second engine, or the policy itself without its adapters."""

from __future__ import annotations

from typing import Any

from areal.api import Finished, Pending, TrainEngine


def check_same_shards(engine: TrainEngine, other: TrainEngine) -> None:
    """Raise unless both engines have the same data-parallel rank and degree here, so that both take the same samples.

    Raises:
        ValueError: the data-parallel layouts differ.
    """
    # Same degree and same index: the samples of both are then the same slice of the global batch.
    mine, theirs = (engine.dp_rank, engine.dp_size), (other.dp_rank, other.dp_size)
    if mine != theirs:
        raise ValueError(
            f"the engine of {engine.config.backend!r} has part {mine[0]} of {mine[1]} of a batch here, and that of "
            f"{other.config.backend!r} part {theirs[0]} of {theirs[1]}: give both the same data-parallel degree"
        )


def check_reference(engine: TrainEngine, reference: TrainEngine) -> None:
    """Raise if an engine cannot be the reference of another.

    Raises:
        ValueError: the data-parallel layouts differ, or both are the same engine, without adapters.
    """
    check_same_shards(engine, reference)
    if reference is engine and engine.config.lora is None:
        raise ValueError("reference is the engine that is trained, without adapters: pass a second engine, or set lora")


def start_reference(engine: TrainEngine, reference: TrainEngine, samples: list[Any]) -> Pending[Any]:
    """Start ``reference.forward_batch(samples)``. If both are the same engine, its adapters are disabled for the call. Collective."""
    if reference is engine:
        with engine.reference():
            return Finished(engine.forward_batch(samples))
    return reference.start(TrainEngine.forward_batch, samples)
