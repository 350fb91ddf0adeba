"""The devices of all ranks as one JAX mesh, and where each array lies on it.

Axes: ``dp``, over which streams and the shards of parameters are divided, and ``tp``, over which matrix products are. An array is a
global value: a rank holds its shards of it, and the partitioner inserts the collectives.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from areal.api.parallel import ParallelDims
from areal.engine.checkpoint.huggingface import VALUE_HEAD
from areal.engine.jax.architecture import EMBEDDING, HEAD
from areal.utils.dtensor import Box

_BY_ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


def build_mesh(dims: ParallelDims) -> Mesh:
    """Return the mesh of this world: one device of each rank, in the order of the ranks of :mod:`areal.utils.mesh`."""
    if dims.world_size == 1:
        devices = [jax.local_devices()[0]]
    else:
        by_rank = {device.process_index: device for device in reversed(jax.devices())}
        devices = [by_rank[rank] for rank in range(dims.world_size)]
    return Mesh(np.array(devices, dtype=object).reshape(dims.dp, dims.tp), ("dp", "tp"))


def stored_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Return how an array of parameters is divided.

    Matrices are divided over ``tp`` as their product is (Shoeybi et al., 2019), and over ``dp`` along the other dimension. An axis that
    does not divide its dimension is left out.
    """
    spec: list[str | None] = [None] * len(shape)
    if name in (EMBEDDING, HEAD) or name.endswith(_BY_ROWS):
        spec[-2:] = "tp", "dp"
    elif name.endswith(_BY_COLUMNS):
        spec[-2:] = "dp", "tp"
    elif name == VALUE_HEAD:
        spec[-1] = "dp"
    return PartitionSpec(
        *(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, shape, strict=True))
    )


def gathered_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the placement of the array in a product: gathered over ``dp``."""
    return PartitionSpec(*(None if axis == "dp" else axis for axis in spec))


def row_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the placement of one row of an array over layers."""
    return PartitionSpec(*spec[1:])


def local_boxes(array: Array) -> list[tuple[Box, Any]]:
    """Return this rank's shards of an array, each with its box, without those that another rank holds, too."""
    return [
        (
            tuple(slice(*s.indices(n)[:2]) for s, n in zip(shard.index, array.shape, strict=True)),
            shard.data,
        )
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def host_view(array: Array) -> torch.Tensor:
    """Return an array of this process in host memory: on a CPU its own memory, which must not be written to."""
    if next(iter(array.devices())).platform == "cpu":
        return torch.from_dlpack(array)
    values = np.array(array)
    if values.dtype == jax.numpy.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def to_torch(array: Array) -> torch.Tensor:
    """Return a copy of an array of this process in host memory or, with equal platforms, on the device."""
    return torch.from_dlpack(array).clone()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor in host memory. numpy has bfloat16 from JAX's package ml_dtypes."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    return host.numpy()
