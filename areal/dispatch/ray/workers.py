"""Ranks in Ray actors."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup

from areal.dispatch.errors import WorkerLostError
from areal.dispatch.executor import Handle, Reply, Work
from areal.dispatch.ray.actor import ProcessInfo
from areal.dispatch.ray.cluster import Demand, check_bundles, default_resources
from areal.dispatch.ray.processes import Processes, Start, start_processes
from areal.dispatch.ray.stored import Store
from areal.dispatch.ray.watch import Limits, Watch
from areal.utils.distributed import TORCHRUN_VARIABLES

logger = logging.getLogger(__name__)

_CLOSED = "the processes were closed: make other RayWorkers, or call restart()"


class RayWorkers:
    """Implements :class:`~areal.dispatch.executor.Executor` by one Ray actor for each rank.

    Ranks of one node are consecutive, in the order of their GPUs. The process of rank 0 opens the store of the rendezvous and keeps it open.
    Connects to the cluster of the job, or starts Ray on this machine, unless ``ray.init`` was called before. When the driver ends, the
    processes end too.

    Args:
        size: number of ranks.
        processes_per_bundle: processes of one bundle of the placement group; a bundle is on one node. ``size`` is a multiple.
        resources: resources of one process, such as ``{"GPU": 1}`` or ``{"TPU": 4}``. Defaults to one CPU, and one GPU if the cluster has
            GPUs.
        strategy: strategy of the placement group: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.
        start_seconds: seconds to wait for the resources, and then for the processes.
        hang_seconds: seconds after which ranks count as lost during a call if none moves.
        grace_seconds: the same once another rank has answered the call with an error.
        ping_seconds: seconds after which a rank counts as lost during a call if it does not answer where it is: its process is stopped, or an
            extension does not let Python run.
        max_result_bytes: bytes of one rank's result above which a call raises an error instead.
        address: host name or IP address at which other nodes reach the process of rank 0. Defaults to the address of its node.
        port: port of the rendezvous. Defaults to a free one.
        environment: environment variables of all processes, except those of torchrun.
        placement_group: placement group of the caller, who removes it. Defaults to one that is made, and removed with the processes.
        bundles: bundles of ``placement_group`` to use, so that several executors divide it. Defaults to the first ones.

    Attributes:
        process_infos: where the process of each rank runs, by rank.
        store: counts the batches and functions that were stored.
        generation: number of times that the processes were replaced.
        max_result_bytes: as given.
        lost: error that has ended the processes, or ``None``.

    Raises:
        ValueError: a value is not possible, or the placement group is too small.
        RuntimeError: resources are missing, or a process does not start. Names the requested, existing and missing resources.
    """

    in_driver = False

    def __init__(
        self,
        size: int,
        *,
        processes_per_bundle: int = 1,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        start_seconds: float = 120.0,
        hang_seconds: float = 600.0,
        grace_seconds: float = 30.0,
        ping_seconds: float = 45.0,
        max_result_bytes: int = 4 * 2**30,
        address: str | None = None,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        placement_group: PlacementGroup | None = None,
        bundles: Sequence[int] | None = None,
    ) -> None:
        limits = {
            "start_seconds": start_seconds,
            "hang_seconds": hang_seconds,
            "grace_seconds": grace_seconds,
            "ping_seconds": ping_seconds,
            "max_result_bytes": max_result_bytes,
        }
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"{name} = {value}: it must be above 0")
        if port is not None and not 0 < port < 2**16:
            raise ValueError(f"port = {port}: it must be from 1 to 65535, or None for a free one")
        protected = sorted(TORCHRUN_VARIABLES & set(environment or {}))
        if protected:
            raise ValueError(
                f"environment has {', '.join(protected)}, which each process gets by its rank: leave it out"
            )
        if bundles is not None and placement_group is None:
            raise ValueError(
                f"bundles = {bundles} without placement_group: pass the group that has them, or leave it out"
            )
        # What can be checked is checked before Ray starts.
        demand = Demand(size, processes_per_bundle, {"CPU": 1} if resources is None else dict(resources), strategy)
        if not ray.is_initialized():
            ray.init()
        if resources is None:
            demand = replace(demand, resources=default_resources(ray.cluster_resources()))
        self.generation, self.max_result_bytes = 0, max_result_bytes
        self.store = Store()
        self._limits = Limits(hang_seconds, grace_seconds, ping_seconds)
        start = Start(
            demand,
            start_seconds,
            max_result_bytes,
            address,
            port,
            dict(environment or {}),
            placement_group,
            None if bundles is None else tuple(bundles),
        )
        self._lock = threading.Lock()
        self._begin(start)

    def _begin(self, start: Start, processes: Processes | None = None) -> None:
        """Start a watch over processes, by default over new ones."""
        self._processes: Processes = processes or start_processes(start)
        self._start, self.size = start, start.demand.size
        self._watch = Watch(self._processes, self._limits)
        # The thread of the watch refers to the processes: without this, they would outlive an executor that was not closed.
        weakref.finalize(self, self._watch.end, RuntimeError(_CLOSED)).atexit = False
        nodes = dict.fromkeys(info.node_name for info in self.process_infos)
        logger.info("%d processes on %d nodes: %s", self.size, len(nodes), ", ".join(nodes))

    @property
    def process_infos(self) -> tuple[ProcessInfo, ...]:
        return self._processes.process_infos

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(info.node for info in self.process_infos)

    @property
    def lost(self) -> Exception | None:
        return self._watch.error

    # ---- the protocol

    def put(self, value: Any, *, keep: bool = False, readers: int = 1) -> Handle:
        """Implement :meth:`areal.dispatch.executor.Executor.put`."""
        return self.store.put(value, keep=keep, readers=readers)

    def share(self, handle: Handle, nbytes: int, references: int, readers: int) -> Handle:
        """Implement :meth:`areal.dispatch.executor.Executor.share`."""
        return self.store.share(handle, nbytes, references, readers)

    def ship(self, function: Any, what: str) -> Handle:
        """Implement :meth:`areal.dispatch.executor.Executor.ship`. The process of rank 0 loads a new function before any rank runs it."""
        return self.store.ship(function, what, self._check)

    def start(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        """Implement :meth:`areal.dispatch.executor.Executor.start`.

        Raises:
            ValueError: the call cannot be sent.
            RuntimeError: the processes are lost or closed.

        The future raises :class:`~areal.dispatch.errors.WorkerLostError` if a process dies or hangs.
        """
        return self._watch.submit(what, work, arguments)

    def restart(self, size: int) -> None:
        """Replace the processes. Calls that still run raise an error.

        Fewer than before are those that are left after a loss, in their placement group, if so many end their calls within ``grace_seconds``.
        Otherwise all are new, in a new placement group.

        Raises:
            ValueError: ``size`` processes do not fill bundles, or those of the caller's placement group. Nothing was changed.
            RuntimeError: resources are missing, or a process does not start.
        """
        start = replace(self._start, demand=replace(self._start.demand, size=size))
        if start.placement_group is not None:
            check_bundles(start.demand, start.placement_group.bundle_specs, start.bundles)
        with self._lock:
            lost, left = self.lost, None
            if isinstance(lost, WorkerLostError) and size < self.size:
                self._watch.join()
                left = self._processes.without(lost.rank, start, size, self._limits.grace_seconds)
            if left is None:
                self.close()
            self._begin(start, left)
            self.generation += 1

    def close(self) -> None:
        """End all processes. Calls that still run raise an error. May be called twice."""
        self._watch.end(RuntimeError(_CLOSED))
        self._watch.join()

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, function: Handle) -> str:
        """Return why rank 0 cannot load a function, or an empty string. A lost process is left to the call."""
        if self._watch.error is not None:
            raise RuntimeError(str(self._watch.error))
        try:
            return ray.get(self._processes.actors[0].check.remote(function), timeout=self._limits.hang_seconds)
        except GetTimeoutError:
            raise self._watch.lose(0, f"has not loaded a function for {self._limits.hang_seconds:g} s") from None
        except RayError:
            return ""
