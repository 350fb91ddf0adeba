"""What engines must be for an algorithm to be right."""

from __future__ import annotations

from areal.api import TrainEngine


def check_granularity(engine: TrainEngine) -> None:
    """See that the engine keeps pairs in one micro-batch.

    Raises:
        ValueError: it does not.
    """
    granularity = engine.config.mb_spec.granularity
    if granularity % 2:
        raise ValueError(
            f"mb_spec.granularity = {granularity}: the two sequences of a pair must stay in one micro-batch: set it to 2"
        )


def check_same_shards(engine: TrainEngine, other: TrainEngine) -> None:
    """See that two engines have the same part of a batch on this rank.

    Raises:
        ValueError: they do not.
    """
    mine, theirs = (engine.dp_rank, engine.dp_size), (other.dp_rank, other.dp_size)
    if mine != theirs:
        raise ValueError(
            f"the engine of {engine.config.backend!r} has part {mine[0]} of {mine[1]} of a batch here, and that of "
            f"{other.config.backend!r} part {theirs[0]} of {theirs[1]}: give both the same data-parallel degree"
        )
