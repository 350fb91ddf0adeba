"""The processes of all ranks: started on reserved resources, joined to one world, and ended together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal.dispatch.ray.actor import ProcessInfo, RankProcess
from areal.dispatch.ray.cluster import Demand, by_rank, check_bundles, local_ranks, release, reserve

_Actor: Any = cast(Any, ray.remote)(concurrency_groups={"health": 2, "life": 1}, max_restarts=0, max_task_retries=0)(
    RankProcess
)


@dataclass(frozen=True)
class Start:
    """Settings of the processes; see :class:`~areal.dispatch.ray.workers.RayWorkers`."""

    demand: Demand
    start_seconds: float
    max_result_bytes: int
    address: str | None
    port: int | None
    environment: Mapping[str, str]
    placement_group: PlacementGroup | None
    bundles: tuple[int, ...] | None

    def bundle(self, number: int) -> int:
        """Return the index of the bundle of the process with this number."""
        index = number // self.demand.processes_per_bundle
        return index if self.bundles is None else self.bundles[index]


@dataclass(frozen=True)
class Processes:
    """The processes of all ranks.

    Attributes:
        actors: Ray actors of :class:`RankProcess`, by rank.
        process_infos: where they run, by rank.
        group: placement group to remove with them, or ``None``.
    """

    actors: tuple[Any, ...]
    process_infos: tuple[ProcessInfo, ...]
    group: PlacementGroup | None

    def end(self) -> None:
        """End all processes, and release their resources. Does not wait for them."""
        _end(self.actors, self.group)

    def end_rank(self, rank: int) -> None:
        """End the process of a rank. Does not wait for it."""
        _end([self.actors[rank]], None)

    def without(self, lost: int, start: Start, size: int, seconds: float) -> Processes | None:
        """Make a world of the first processes that are left after a loss, and end the others.

        Args:
            lost: rank of the lost process.
            start: settings of the processes.
            size: number of processes.
            seconds: limit for what still runs in them.

        Returns:
            The processes, or ``None`` if fewer have left the world of the lost one.
        """
        left = [rank for rank in range(len(self.actors)) if rank != lost]
        ranks = {self.actors[rank].leave.remote(): rank for rank in left}
        # Others may be lost, too. One that waits in a collective of the caller's code never replies.
        kept: list[int] = []
        waiting, end = [*ranks], time.monotonic() + seconds
        while waiting and len(kept) < size:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            kept += [ranks[ref] for ref in ready if _succeeded(ref)]
            if not ready:
                break
        if len(kept) < size:
            return None
        kept.sort()
        _end([self.actors[rank] for rank in set(left) - set(kept)], None)
        infos = [self.process_infos[rank] for rank in kept]
        try:
            return _join(start, [self.actors[rank] for rank in kept], infos, self.group)
        except RuntimeError:
            return None


def start_processes(start: Start) -> Processes:
    """Start one process for each rank.

    Raises:
        ValueError: the caller's placement group is too small for the processes.
        RuntimeError: resources are missing, or a process does not start.
    """
    # The resources of all processes are reserved before any process starts.
    if start.placement_group is None:
        group = owned = reserve(start.demand, start.start_seconds)
    else:
        group, owned = start.placement_group, None
        check_bundles(start.demand, group.bundle_specs, start.bundles)
        if not group.wait(max(1, round(start.start_seconds))):
            raise RuntimeError(
                f"placement_group was not placed within start_seconds = {start.start_seconds:g} s: make another, or wait for it before"
            )
    actors: list[Any] = []
    try:
        for number in range(start.demand.size):
            actors.append(_new_actor(start, group, start.bundle(number)))
        found: list[ProcessInfo] = _all(start, "start", [actor.process_info.remote() for actor in actors])
        return _join(start, actors, found, owned)
    except BaseException:
        _end(actors, owned)
        raise


def _new_actor(start: Start, group: PlacementGroup, bundle: int) -> Any:
    """Start a process in a bundle."""
    options: dict[str, Any] = start.demand.options
    if start.environment:
        options["runtime_env"] = {"env_vars": dict(start.environment)}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return _Actor.options(scheduling_strategy=strategy, **options).remote(bundle, start.max_result_bytes)


def _join(start: Start, actors: list[Any], found: list[ProcessInfo], group: PlacementGroup | None) -> Processes:
    """Give each process its rank. Ranks follow from where the processes run."""
    order = by_rank(found)
    ranked, process_infos = [actors[i] for i in order], [found[i] for i in order]
    # The process of rank 0 listens on the port from here on, so that no other program can take it.
    address = start.address or process_infos[0].address
    [port] = _all(start, f"listen on port = {start.port or 'any'}", [ranked[0].open_store.remote(start.port or 0)])
    _all(
        start,
        "join",
        [
            actor.enter.remote(rank, len(ranked), local, address, port)
            for rank, (actor, local) in enumerate(zip(ranked, local_ranks(process_infos), strict=True))
        ],
    )
    return Processes(tuple(ranked), tuple(process_infos), group)


def _all(start: Start, what: str, refs: list[Any]) -> list[Any]:
    """Wait for all processes.

    Raises:
        RuntimeError: one fails, or they take longer than the limit.
    """
    try:
        return ray.get(refs, timeout=start.start_seconds)
    except GetTimeoutError:
        late = len(refs) - len(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        raise RuntimeError(
            f"{late} of {len(refs)} processes did not {what} within start_seconds = {start.start_seconds:g} s: raise it, or read the logs"
        ) from None
    except RayTaskError as error:
        raise RuntimeError(f"a process could not {what}: {error.cause}") from error
    except RayError as error:
        raise RuntimeError(f"a process could not {what}: {error}") from error


def _succeeded(ref: ray.ObjectRef) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return False
    return True


def _end(actors: Any, group: PlacementGroup | None) -> None:
    """End processes, also where Ray itself does not reply any more. Without Ray they have ended."""
    # Ray starts another cluster for a call after its end, which knows none of them: old releases abort the process then.
    if not ray.is_initialized():
        return
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)
    if group is not None:
        with suppress(Exception):
            release(group)
