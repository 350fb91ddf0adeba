"""The process groups of a layout, under Megatron-Core's names. The global state of ``megatron.core.parallel_state`` is not used.

Two grids arrange the same ranks: the dense grid over ``pp, dp, cp, tp``, which is the batch mesh of :mod:`areal.utils.mesh`, and the expert
grid over ``pp``, expert data parallel, ``ep`` and expert tensor parallel.

These groups are not a ``DeviceMesh``: Megatron-Core takes groups over combinations of axes of both grids, and one of the first and the last
pipeline stage, which no mesh has. Combinations over the same ranks share one group, with one exception: gradients are reduced while layers
communicate, in a group apart.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from areal.api.parallel import ParallelDims
from areal.utils import platform
from areal.utils.group_set import GroupSet

Ranks = tuple[int, ...]

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "expt_dp", "ep", "expt_tp")

# Megatron-Core's name of a group -> the axes of the grid that it spans.
_DENSE_GROUPS = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp cp",
    "tp_cp": "cp tp",
    "tp_dp_cp": "dp cp tp",
    "mp": "pp tp",
    "intra_dist_opt": "pp dp cp tp",
}
_EXPERT_GROUPS = {
    "ep": "ep",
    "expt_tp": "expt_tp",
    "expt_dp": "expt_dp",
    "tp_ep": "ep expt_tp",
    "tp_ep_pp": "pp ep expt_tp",
}
_OF_LAYERS = frozenset({"tp", "cp", "tp_cp", "ep", "expt_tp", "tp_ep"})
_OF_BUCKETS = frozenset({"dp_cp", "expt_dp"})
"""Groups of layers, and of gradient buckets. With one communicator, both would wait for each other, in an order that all ranks must keep."""


class ProcessGroups:
    """Creates the process groups of a layout over all ranks. Collective.

    Attributes:
        collection: groups of this rank, in the form that Megatron-Core takes.

    Args:
        dims: layout.
        groups: set that closes the groups.
    """

    def __init__(self, dims: ParallelDims, groups: GroupSet) -> None:
        with groups.creating():
            self._create(dims)

    def _create(self, dims: ParallelDims) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # By their ranks, and whether they are for buckets alone; None without this rank.
        self._groups: dict[tuple[Ranks, bool], dist.ProcessGroup | None] = {}
        self._of_layers: set[Ranks] = set()
        world = torch.arange(self._size)
        self._dense = world.view(dims.pp, dims.dp, dims.cp, dims.tp)
        self._expert = world.view(dims.pp, dims.expert_dp, dims.ep, dims.expert_tp)
        collection = ProcessGroupCollection()
        grids = ((self._dense, DENSE, _DENSE_GROUPS), (self._expert, EXPERT, _EXPERT_GROUPS))
        named = {name: (grid, axes, spans.split()) for grid, axes, names in grids for name, spans in names.items()}
        # Groups of buckets are created last, when those of layers are known.
        for name in sorted(named, key=_OF_BUCKETS.__contains__):
            setattr(collection, name, self._group(name, *named[name]))
        collection.embd = self._embedding_group()
        collection.pos_embd = None
        collection.hcp = None
        self.collection = collection

    def release(self) -> None:
        """Release the references to the groups, before they are closed."""
        del self.collection
        self._groups.clear()

    def _group(self, name: str, grid: Tensor, axes: tuple[str, ...], spans: list[str]) -> dist.ProcessGroup:
        """Create all groups over the axes ``spans``, and return that of this rank."""
        fixed = [axis for axis in axes if axis not in spans]
        axis_names = "+".join(axis for axis in spans if grid.shape[axes.index(axis)] > 1)
        mine = None
        # Every rank creates every group, in the same order: new_group is collective over the world.
        for coordinate in product(*(range(grid.shape[axes.index(axis)]) for axis in fixed)):
            index = tuple(coordinate[fixed.index(axis)] if axis in fixed else slice(None) for axis in axes)
            ranks = tuple(grid[index].flatten().tolist())
            if name in _OF_LAYERS:
                self._of_layers.add(ranks)
            apart = name in _OF_BUCKETS and len(ranks) > 1 and ranks in self._of_layers
            group = self._get_or_create(ranks, axis_names, apart=apart)
            mine = group if self._rank in ranks else mine
        if mine is None:
            raise RuntimeError(f"rank {self._rank} is in no group over {spans}")
        return mine

    def _embedding_group(self) -> dist.ProcessGroup | None:
        """Create the groups of a first and a last pipeline stage, which both have a tied embedding. Returns that of this rank, if any."""
        pipelines = self._dense.flatten(1).T.tolist()
        mine = None
        for ranks in pipelines:
            ends = tuple(dict.fromkeys((ranks[0], ranks[-1])))
            group = self._get_or_create(ends, "pp")
            mine = group if self._rank in ends else mine
        return mine

    def _get_or_create(self, ranks: Ranks, axis_names: str, *, apart: bool = False) -> dist.ProcessGroup | None:
        """Return the group of these ranks, ``None`` on others. A new one has the axes that it spans as its name."""
        if (ranks, apart) not in self._groups:
            group = dist.new_group(list(ranks), backend=platform.collective_backend(), group_desc=f"grid_{axis_names}")
            self._groups[ranks, apart] = group if self._rank in ranks else None
        return self._groups[ranks, apart]
