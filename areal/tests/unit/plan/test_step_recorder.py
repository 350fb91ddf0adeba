"""The recorder of a plan counts every collective of an engine, or raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from areal.plan.planned_world import planned_world
from areal.plan.step_recorder import Collective, CollectiveCalls, StepRecorder
from areal.tests.harness.world import no_world

ROWS = torch.empty(3, 5, device="meta")


@pytest.fixture(autouse=True)
def _rank_of_four() -> Iterator[None]:
    with no_world(), planned_world(0, 4):
        yield


def test_collectives_of_named_groups_are_counted() -> None:
    ranks, tensors = dist.new_group(group_desc="all_ranks"), dist.new_group([0, 2], group_desc="mesh_tp")
    with StepRecorder(simulate=True) as recorder:
        dist.all_reduce(ROWS, group=ranks)
        dist.all_reduce(ROWS, group=tensors)
        # DTensor's collectives are other operations.
        functional.all_reduce(ROWS, "sum", tensors)
        functional.all_gather_tensor(ROWS, 0, tensors)
    assert recorder.collectives == {
        Collective("all_reduce", "all", 4, 1): CollectiveCalls(1, 60),
        Collective("all_reduce", "tp", 2, 2): CollectiveCalls(2, 120),
        Collective("all_gather", "tp", 2, 2): CollectiveCalls(1, 120),
    }


def test_only_the_control_plane_is_left_out() -> None:
    group = dist.new_group()
    with StepRecorder(simulate=True) as recorder:
        dist.all_reduce(torch.ones(()), group=group)
        with pytest.raises(RuntimeError, match="allreduce_ in group 'undefined': a plan counts"):
            dist.all_reduce(ROWS, group=group)
    assert not recorder.collectives


def test_unknown_collective_is_refused() -> None:
    group = dist.new_group(group_desc="mesh_dp")
    with StepRecorder(simulate=True), pytest.raises(RuntimeError, match="reduce_ in group 'mesh_dp': a plan counts"):
        dist.reduce(ROWS, 0, group=group)
