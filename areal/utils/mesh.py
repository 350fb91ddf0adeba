"""The device meshes of an engine. All of them are built here.

Each mesh arranges all ranks of the engine in a grid. The last axis varies fastest: its ranks are neighbours.

========  ===================================  =====================================================
mesh      axes                                 what the axes split
========  ===================================  =====================================================
batch     ``pp, dp, cp, tp``                   layers, samples, tokens, matrix products; every engine
params    ``pp, dp_replicate, dp_shard_cp,     parameters of the FSDP engine. Context-parallel ranks have
          tp``                                 the same parameters and other tokens, so that they shard and
                                               reduce parameters like data-parallel ranks.
experts   ``pp, dp_replicate, edp, ep``        experts of the FSDP engine: ``ep`` ranks have different
                                               experts, ``edp`` ranks shard the same experts.
========  ===================================  =====================================================

``dp`` is ``dp_replicate`` times ``dp_shard``, and ``dp_shard_cp`` is ``edp`` times ``ep``.

Megatron-Core takes process groups instead of meshes: also over combinations of axes, and for the first and the last stage of a pipeline.
:mod:`areal.engine.megatron.process_groups` builds them over the same arrangement of ranks.
"""

from __future__ import annotations

import itertools
import re

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from areal.api.parallel import ParallelDims
from areal.utils import platform
from areal.utils.group_set import GroupSet

_mesh_numbers = itertools.count()


def build_batch_mesh(dims: ParallelDims, device_type: str, groups: GroupSet) -> DeviceMesh:
    """Build the mesh over which batches are split, with axes ``pp, dp, cp, tp``. Collective."""
    return _build(device_type, {"pp": dims.pp, "dp": dims.dp, "cp": dims.cp, "tp": dims.tp}, groups)


def build_param_mesh(dims: ParallelDims, device_type: str, groups: GroupSet) -> DeviceMesh:
    """Build the mesh over which parameters are sharded, with axes ``pp, dp_replicate, dp_shard_cp, tp``. Collective."""
    axes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "dp_shard_cp": dims.dp_shard * dims.cp, "tp": dims.tp}
    return _build(device_type, _numbered(axes), groups)


def build_expert_mesh(dims: ParallelDims, device_type: str, groups: GroupSet) -> DeviceMesh:
    """Build the mesh over which experts are spread and sharded, with axes ``pp, dp_replicate, edp, ep``. Collective."""
    shards = dims.dp_shard * dims.cp // dims.ep
    axes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "edp": shards, "ep": dims.ep}
    return _build(device_type, _numbered(axes), groups)


def group_of_all_ranks(groups: GroupSet) -> dist.ProcessGroup | None:
    """Create a process group of all ranks, which is added to ``groups``; ``None`` for one rank. Collective."""
    if dist.get_world_size() == 1:
        return None
    with groups.creating():
        return dist.new_group(backend=platform.collective_backend(), group_desc="all_ranks")


def submesh(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Return the mesh of this rank over ``axes``, which are named as in the table above."""
    names = {_plain(name): name for name in mesh.mesh_dim_names or ()}
    return mesh[tuple(names[axis] for axis in axes)]


def describe_mesh(mesh: DeviceMesh) -> str:
    """Return the axes with their sizes, such as ``pp=1 dp=2 cp=1 tp=1``."""
    return " ".join(f"{_plain(name)}={n}" for name, n in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def release_groups(mesh: DeviceMesh) -> None:
    """Release the references of a mesh to its process groups, before they are closed.

    DTensor's caches may keep a mesh, and a mesh keeps its groups, whose connections close with the last reference.
    """
    mesh._pg_registry.clear()


def _build(device_type: str, axes: dict[str, int], groups: GroupSet) -> DeviceMesh:
    """Build a mesh over all ranks. Its process groups are used by nothing else, and are added to ``groups``, which closes them."""
    ranks = torch.arange(dist.get_world_size()).view(tuple(axes.values()))
    # With a backend by name, an axis over all ranks gets a group instead of the default one, which outlives the engine.
    backends = tuple((platform.collective_backend(), None) for _ in axes) if ranks.numel() > 1 else None
    with groups.creating():
        return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes), backend_override=backends)


def _numbered(axes: dict[str, int]) -> dict[str, int]:
    """Add a unique number to the names of the axes.

    DTensor's caches compare meshes by value. Without unique names, an engine's parameters could get the mesh, and the closed groups, of an
    earlier engine of the same layout.
    """
    number = next(_mesh_numbers)
    return {f"{axis}_{number}": size for axis, size in axes.items()}


def _plain(name: str) -> str:
    return re.sub(r"_\d+$", "", name)
