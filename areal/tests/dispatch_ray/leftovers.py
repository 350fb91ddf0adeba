"""What a test has left in the cluster that tests share: placement groups, actors, resources that are not free."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray._private.state import actors
from ray.util.placement_group import placement_group_table

SECONDS = 30.0
"""Limit of the wait for Ray to end what a test has ended: on a busy machine, a process takes seconds to end."""


@dataclass(frozen=True)
class Contents:
    """What is in the cluster.

    Attributes:
        groups: ids of placement groups.
        actors: ids of actors.
        free: resources that are not in use, by name.
    """

    groups: frozenset[str]
    actors: frozenset[str]
    free: dict[str, float]


def contents(ray: Any) -> Contents:
    """Return what is in the cluster now."""
    groups = {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}
    alive = {name for name, actor in actors().items() if actor["State"] != "DEAD"}
    return Contents(frozenset(groups), frozenset(alive), available(ray))


def available(ray: Any) -> dict[str, float]:
    """Return the resources that are not in use, but for memory."""
    return {
        name: number for name, number in ray.available_resources().items() if name in ("CPU", "TPU", "chip", "slot")
    }


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait for a condition. Returns False if it does not become true in time."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def leftovers(ray: Any, before: Contents) -> str:
    """Return what is in the cluster and was not before, once Ray has had time to end it; empty if there is nothing."""
    if wait_until(lambda: contents(ray) == before):
        return ""
    now = contents(ray)
    return (
        f"left in the cluster: placement groups {sorted(now.groups - before.groups)}, actors {sorted(now.actors - before.actors)}; "
        f"free are {now.free}, and were {before.free}"
    )
