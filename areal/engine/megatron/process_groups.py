"""The process groups of a layout, as Megatron-Core names them. Nothing of ``megatron.core.parallel_state`` is used.

Two grids lay out the same ranks: the dense one over ``pp, dp, cp, tp``, as the engine's mesh has it, and that of the experts over ``pp``,
expert data parallel, ``ep`` and expert tensor parallel. ProcessGroups of the same ranks are one group.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from areal.api.parallel import ParallelDims
from areal.utils import platform

Ranks = tuple[int, ...]

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "expt_dp", "ep", "expt_tp")

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


class ProcessGroups:
    """Makes the groups of a layout over the whole world. Collective.

    Attributes:
        collection: what Megatron-Core takes.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._made: dict[Ranks, dist.ProcessGroup | None] = {}
        world = torch.arange(self._size)
        self._dense = world.view(dims.pp, dims.dp, dims.cp, dims.tp)
        self._expert = world.view(dims.pp, dims.expert_dp, dims.ep, dims.expert_tp)
        collection = ProcessGroupCollection()
        for grid, axes, names in ((self._dense, DENSE, _DENSE_GROUPS), (self._expert, EXPERT, _EXPERT_GROUPS)):
            for name, spans in names.items():
                setattr(collection, name, self._group(grid, axes, spans.split()))
        collection.embd = self._embedding_group()
        collection.pos_embd = None
        collection.hcp = None
        self.collection = collection

    def close(self) -> None:
        """Close every group. On gloo, a peer that waits in one of them then gets an error once the last reference is gone."""
        del self.collection
        made = [group for group in self._made.values() if group is not None]
        self._made.clear()
        while made:
            dist.destroy_process_group(made.pop())

    def _group(self, grid: Tensor, axes: tuple[str, ...], spans: list[str]) -> dist.ProcessGroup:
        """The group of this rank over ``spans``; every rank makes all of that kind."""
        fixed = [axis for axis in axes if axis not in spans]
        mine = None
        for place in product(*(range(grid.shape[axes.index(axis)]) for axis in fixed)):
            index = tuple(place[fixed.index(axis)] if axis in fixed else slice(None) for axis in axes)
            ranks = tuple(grid[index].flatten().tolist())
            group = self._of(ranks)
            mine = group if self._rank in ranks else mine
        if mine is None:
            raise RuntimeError(f"rank {self._rank} is in no group over {spans}")
        return mine

    def _embedding_group(self) -> dist.ProcessGroup | None:
        """The first and the last stage, which hold a tied embedding between them."""
        columns = self._dense.flatten(1).T.tolist()
        mine = None
        for ranks in columns:
            ends = tuple(dict.fromkeys((ranks[0], ranks[-1])))
            group = self._of(ends)
            mine = group if self._rank in ends else mine
        return mine

    def _of(self, ranks: Ranks) -> dist.ProcessGroup | None:
        if ranks not in self._made:
            group = dist.new_group(list(ranks), backend=platform.collective_backend())
            self._made[ranks] = group if self._rank in ranks else None
        return self._made[ranks]
