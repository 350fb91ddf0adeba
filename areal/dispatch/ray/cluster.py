"""Placement of processes in a Ray cluster: resources, bundles, and the order of ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from areal.dispatch.ray.actor import ProcessInfo

PLACEMENT_SECONDS = 10.0
"""Limit of the wait for a placement group that Ray is placing. Placing takes milliseconds."""

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

Resources = Mapping[str, float]
"""Quantities by the name of a resource: ``CPU``, ``GPU``, or a custom one such as ``TPU``."""


@dataclass(frozen=True)
class Demand:
    """The processes to place.

    Attributes:
        size: number of processes.
        processes_per_bundle: processes of one bundle, which are on one node.
        resources: resources of one process.
        strategy: strategy of the placement group.

    Raises:
        ValueError: a value is not possible.
    """

    size: int
    processes_per_bundle: int
    resources: Resources
    strategy: str

    def __post_init__(self) -> None:
        if self.size < 1 or self.processes_per_bundle < 1 or self.size % self.processes_per_bundle:
            raise ValueError(
                f"size = {self.size} processes do not fill bundles of processes_per_bundle = {self.processes_per_bundle}: give a multiple"
            )
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy = {self.strategy!r}: it must be one of {', '.join(STRATEGIES)}")
        if not self.resources or not all(quantity > 0 for quantity in self.resources.values()):
            raise ValueError(
                f"resources = {dict(self.resources)}: give the quantities of one process, each above 0, such as {{'GPU': 1}}"
            )

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return the resources of each bundle."""
        one = {name: self.processes_per_bundle * quantity for name, quantity in self.resources.items()}
        return [one] * (self.size // self.processes_per_bundle)

    @property
    def options(self) -> dict[str, Any]:
        """Return the resources of one process as options of an actor."""
        others = {name: quantity for name, quantity in self.resources.items() if name not in ("CPU", "GPU")}
        return {"num_cpus": self.resources.get("CPU", 0), "num_gpus": self.resources.get("GPU", 0), "resources": others}


def reserve(demand: Demand, seconds: float) -> PlacementGroup:
    """Make a placement group, and wait for its resources.

    Args:
        demand: processes to place.
        seconds: limit of the wait, in which nodes may still join the cluster.

    Raises:
        RuntimeError: the resources are not free within the limit. The placement group is removed.
    """
    group = placement_group(demand.bundles, strategy=demand.strategy)
    try:
        if group.wait(seconds):
            return group
        missing = explain(demand, ray.nodes(), ray.available_resources())
    except BaseException:
        release(group)
        raise
    release(group)
    raise RuntimeError(f"Ray did not place the processes within start_seconds = {seconds:g} s: {missing}")


def release(group: PlacementGroup) -> None:
    """Remove a placement group, and not while Ray is placing it.

    Ray 2.60 never frees the resources of a group that is removed between the moments in which a node has reserved its bundles and in
    which they are committed. So wait until the group is placed, or Ray finds that its resources are not free.
    """
    deadline = time.monotonic() + PLACEMENT_SECONDS
    while _is_being_placed(group) and time.monotonic() < deadline:
        time.sleep(0.01)
    remove_placement_group(group)


def _is_being_placed(group: PlacementGroup) -> bool:
    row = placement_group_table(group)
    waits = row["stats"]["scheduling_state"] in ("NO_RESOURCES", "INFEASIBLE")
    return row["state"] == "PREPARED" or (row["state"] in ("PENDING", "RESCHEDULING") and not waits)


def explain(demand: Demand, nodes: Sequence[Mapping[str, Any]], free: Resources) -> str:
    """Return which resources are requested, exist, and are missing.

    Args:
        demand: processes to place.
        nodes: what ``ray.nodes()`` returns.
        free: resources of the cluster that are not in use.
    """
    # Sums over the bundles and over the nodes that are alive, of the resources that are requested.
    names = list(demand.resources)
    alive = [node for node in nodes if node["Alive"]]
    requested = {name: sum(bundle[name] for bundle in demand.bundles) for name in names}
    existing = {name: sum(node["Resources"].get(name, 0) for node in alive) for name in names}
    unused = {name: free.get(name, 0) for name in names}
    missing = {name: requested[name] - unused[name] for name in names if requested[name] > unused[name]}
    each = "; ".join(
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]}) has {_show({name: node['Resources'].get(name, 0) for name in names})}"
        for node in alive
    )
    return (
        f"requested {_show(requested)} in {len(demand.bundles)} bundles of {_show(demand.bundles[0])}, {demand.strategy}, existing "
        f"{_show(existing)}, not in use {_show(unused)}, missing {_show(missing) if missing else 'nothing in sum, but no placement fits'}. "
        f"Nodes: {each}. Add nodes, end other work, or change resources, processes_per_bundle or strategy"
    )


def default_resources(cluster: Resources) -> dict[str, float]:
    """Return the resources of a process that names none: training on CPUs beside idle GPUs would be a mistake.

    Args:
        cluster: resources of the cluster.
    """
    return {"CPU": 1.0} | ({"GPU": 1.0} if cluster.get("GPU", 0) > 0 else {})


def check_bundles(demand: Demand, bundles: Sequence[Resources], chosen: Sequence[int] | None = None) -> None:
    """Check that a placement group of the caller has room.

    Args:
        demand: processes to place.
        bundles: resources of each bundle of the placement group.
        chosen: bundles to use; ``None`` for the first ones.

    Raises:
        ValueError: it has too few bundles, or a bundle has too few resources.
    """
    needed, available = demand.bundles, range(len(bundles))
    chosen = available if chosen is None else chosen
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(available):
        raise ValueError(f"bundles = {list(chosen)}: name each once, from 0 to {len(bundles) - 1}")
    if len(chosen) < len(needed):
        what = "placement_group has" if chosen is available else "bundles names"
        raise ValueError(
            f"{what} {len(chosen)} bundles, and size = {demand.size} with processes_per_bundle = {demand.processes_per_bundle} "
            f"needs {len(needed)}: one bundle for each {demand.processes_per_bundle} ranks"
        )
    for index, its in zip(chosen, needed, strict=False):
        if any(bundles[index].get(name, 0) < quantity for name, quantity in its.items()):
            raise ValueError(
                f"placement_group: bundle {index} has {_show(bundles[index])}, and {demand.processes_per_bundle} processes with resources = "
                f"{_show(demand.resources)} each need {_show(its)}"
            )


def _show(resources: Resources) -> str:
    return "{" + ", ".join(f"{name}: {quantity:g}" for name, quantity in resources.items()) + "}"


# ---- the order of ranks


def by_rank(process_infos: Sequence[ProcessInfo]) -> list[int]:
    """Return the index of the process of each rank: processes of a node are consecutive, in the order of their accelerators.

    Args:
        process_infos: of the processes, by bundle. The nodes are in the order of their first bundles.
    """
    nodes: dict[str, int] = {}
    for info in process_infos:
        nodes.setdefault(info.node, len(nodes))
    return sorted(range(len(process_infos)), key=lambda i: (nodes[process_infos[i].node], process_infos[i].indices, i))


def local_ranks(process_infos: Sequence[ProcessInfo]) -> list[tuple[int, int]]:
    """Return ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` of each rank: among the processes of the node that see the same devices.

    Ray shows a process only its own accelerators: then these are 0 and 1. Processes that see no accelerator share the node.

    Args:
        process_infos: by rank.
    """
    sharers = Counter((info.node, info.devices) for info in process_infos)
    seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
    locals_ = []
    for info in process_infos:
        key = (info.node, info.devices)
        locals_.append((seen[key], sharers[key]))
        seen[key] += 1
    return locals_
