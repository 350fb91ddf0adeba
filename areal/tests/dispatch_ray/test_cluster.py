"""Placement groups on a real cluster: what is reserved is freed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ray.util.placement_group import placement_group, placement_group_table

from areal.dispatch.ray import RayWorkers
from areal.dispatch.ray.cluster import (
    release,
)
from areal.tests.dispatch_ray.leftovers import available, contents, leftovers, wait_until


def states() -> list[str]:
    return sorted(group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED")


def test_too_few_resources_raise_and_the_placement_group_is_removed(cluster: Any) -> None:
    before = states()
    with pytest.raises(
        RuntimeError,
        match=r"within start_seconds = 1 s: requested \{CPU: 8\} in 4 bundles of \{CPU: 2\}.*existing \{CPU: 4\}.*missing \{CPU: ",
    ):
        RayWorkers(8, processes_per_bundle=2, start_seconds=1)
    assert states() == before


def test_placement_group_of_the_caller_must_have_room(cluster: Any) -> None:
    group = placement_group([{"CPU": 1}])
    try:
        with pytest.raises(
            ValueError, match="placement_group has 1 bundles, and size = 2 with processes_per_bundle = 1 needs 2"
        ):
            RayWorkers(2, placement_group=group)
        with pytest.raises(
            ValueError, match=r"placement_group: bundle 0 has \{CPU: 1\}, and 2 processes .* need \{CPU: 2\}"
        ):
            RayWorkers(2, processes_per_bundle=2, placement_group=group)
    finally:
        release(group)


def test_group_that_is_removed_at_any_moment_frees_its_resources(cluster: Any) -> None:
    """Removed without a wait, about one in ten of these keeps its resources for ever."""
    free = available(cluster)
    for moment in range(150):
        group = placement_group([{"slot": 1}])
        time.sleep(moment % 3 * 1e-4 + 1e-4)
        release(group)
    assert wait_until(lambda: available(cluster) == free), f"{available(cluster)} is free, and {free} was"


def test_group_that_has_no_place_is_removed_at_once(cluster: Any) -> None:
    group = placement_group([{"CPU": 1000}])
    release(group)
    assert wait_until(lambda: placement_group_table(group)["state"] == "REMOVED")


def test_what_a_test_leaves_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.tests.dispatch_ray.leftovers.SECONDS", 0.5)
    before = contents(cluster)
    group = placement_group([{"CPU": 1}])
    assert group.wait(10)
    name = group.id.hex()
    assert name in leftovers(cluster, before)
    release(group)
