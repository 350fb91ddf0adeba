"""Layouts of the processes of a group: the number of ranks, and tensor-parallel groups on several nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from areal.api import ParallelDims

logger = logging.getLogger(__name__)


def count_ranks(dims: ParallelDims, processes: ParallelDims) -> str:
    """Return the number of ranks of a layout, and of processes if a process is several ranks."""
    ranks, size = f"{dims.world_size} ranks", processes.world_size
    return ranks if size == dims.world_size else f"{ranks} in {size} processes"


def tensor_parallel_over_nodes(dims: ParallelDims, nodes: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each tensor-parallel group that is not on one node.

    Args:
        dims: layout of the processes.
        nodes: name of the node of each process.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(len(nodes)):
        places = dims.coordinates(rank)
        groups.setdefault((places["pp"], places["dp"], places["cp"]), []).append(rank)
    return [ranks for ranks in groups.values() if len({nodes[rank] for rank in ranks}) > 1]


def warn_of_groups_over_nodes(dims: ParallelDims, processes: ParallelDims, nodes: Sequence[str]) -> None:
    """Log a warning for each tensor-parallel group that is on several nodes.

    Args:
        dims: layout of the ranks.
        processes: layout of the processes.
        nodes: name of the node of each process.
    """
    for ranks in tensor_parallel_over_nodes(processes, nodes):
        logger.warning(
            "tensor-parallel ranks %s of %s are on several nodes, so that each layer waits for the network: set "
            "RayWorkers(processes_per_bundle=%d), or choose a smaller t",
            ", ".join(map(str, ranks)),
            dims,
            processes.tp,
        )
