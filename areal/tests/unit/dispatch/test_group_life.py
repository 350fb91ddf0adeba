"""Initialization that is interrupted or fails on one rank: what is left on the ranks can be destroyed by its own group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from unittest import mock

import pytest

from areal.api import FinetuneSpec, TrainEngineConfig
from areal.dispatch import WorkerGroup, rank_calls
from areal.dispatch.executor import PendingCall
from areal.tests.harness.tiny import config
from areal.tests.unit.dispatch.simulated import SimulatedRay, WorkingRank, simulated, simulated_ray

__all__ = ["simulated_ray"]

SPEC = FinetuneSpec(total_train_steps=10)


class StandIn:
    """An engine without a model.

    Attributes:
        failing: ranks whose engine is not initialized.
        destroyed: ranks whose engine was destroyed, in order.
    """

    failing: set[int]
    destroyed: list[int]
    is_main = True

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank

    def initialize(self, spec: FinetuneSpec) -> None:
        if self.dp_rank in self.failing:
            raise RuntimeError("out of memory")

    def destroy(self) -> None:
        self.destroyed.append(self.dp_rank)


@contextmanager
def two_ranks(
    its: SimulatedRay, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WorkerGroup, WorkerGroup, list[WorkingRank]]]:
    """Yield two groups of one name on two ranks, and the ranks."""
    StandIn.failing, StandIn.destroyed = set(), []
    ranks = [WorkingRank(rank, 2, its) for rank in range(2)]
    # The ranks create their engines in order.
    created = count()

    def create(_: TrainEngineConfig) -> StandIn:
        return StandIn(next(created) % 2)

    monkeypatch.setattr(rank_calls, "create_engine", create)
    monkeypatch.setattr(rank_calls, "rules_of", lambda engine: None)
    with simulated(ranks) as workers:
        yield WorkerGroup(config("fsdp:d2"), workers), WorkerGroup(config("fsdp:d2"), workers), ranks


def engines(ranks: list[WorkingRank]) -> list[int]:
    """Return the ranks that have an engine."""
    return [number for number, rank in enumerate(ranks) if "engine" in rank.objects.by_name]


def test_engine_of_an_interrupted_initialize_is_destroyed(
    simulated_ray: SimulatedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(simulated_ray, monkeypatch) as (group, other, ranks):
        with mock.patch.object(PendingCall, "result", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            group.initialize(SPEC)
        assert engines(ranks) == [0, 1]
        # A group that has the name by mistake does not destroy the engine.
        with pytest.raises(RuntimeError, match="already initialized: destroy it"):
            other.initialize(SPEC)
        other.destroy()
        assert engines(ranks) == [0, 1]
        group.destroy()
        assert (engines(ranks), StandIn.destroyed) == ([], [0, 1])
        group.initialize(SPEC)
        group.destroy()
        group.destroy()
        assert StandIn.destroyed == [0, 1, 0, 1]


def test_engines_beside_one_that_fails_are_destroyed(
    simulated_ray: SimulatedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(simulated_ray, monkeypatch) as (group, _, ranks):
        StandIn.failing = {1}
        with pytest.raises(RuntimeError, match="rank 1: out of memory"):
            group.initialize(SPEC)
        assert engines(ranks) == [0]
        StandIn.failing = set()
        group.destroy()
        assert (engines(ranks), StandIn.destroyed) == ([], [0])
        group.initialize(SPEC)
        assert engines(ranks) == [0, 1]


@pytest.mark.parametrize("name", ["", "policy/ema", "ppo/"])
def test_names_of_groups_have_no_slash(name: str) -> None:
    """The names of objects on the ranks begin with the name of their group and a slash."""
    with pytest.raises(ValueError, match=f"name = {name!r}: it must not be empty, and have no slash"):
        WorkerGroup(config("fsdp:d1"), name=name)


def test_second_initialize_changes_nothing() -> None:
    """The ranks would refuse it, and keep their version."""
    with WorkerGroup(config("fsdp:d1")) as group:
        group.initialize(SPEC)
        group.set_version(5)
        with pytest.raises(RuntimeError, match="already initialized: destroy it, or make another group"):
            group.initialize(FinetuneSpec(total_train_steps=1))
        assert group.version == 5
        group.destroy()
        group.initialize(SPEC)
        assert group.version == 0
