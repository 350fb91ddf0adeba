"""The devices of all ranks as one JAX mesh, and where each array lies on it.

Axes: ``r``, ``dp`` and ``ep``, over which streams are divided; ``cp``, over which the tokens of a stream are; and ``tp``, over which
matrix products are. Parameters are divided over ``dp``, ``ep`` and ``cp``; experts are spread over ``ep`` and ``tp``. An array is a global
value: a device holds its shard of it, and the partitioner inserts the collectives. Each rank of the layout is one device. A process has
one or several ranks, and passes and reads the shards of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from areal.api.parallel import ParallelDims
from areal.engine.jax.model.architecture import EMBEDDING, EXPERTS, HEAD
from areal.engine.model.classifier import VALUE_WEIGHT
from areal.utils.dtensor import Box

_T = TypeVar("_T")

AXES = ("r", "dp", "ep", "cp", "tp")
STREAMS = ("r", "dp", "ep")
"""Axes of the first dimension of ``[D, ...]`` arrays."""

SHARDS = ("dp", "ep", "cp")
"""Axes over which parameters, gradients and optimizer state are sharded."""

_BY_ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


def build_mesh(dims: ParallelDims, processes: Sequence[int], devices_per_process: int = 1) -> Mesh:
    """Return the mesh of this world: one device of each rank, in the order of the ranks of :mod:`areal.utils.mesh`.

    Args:
        dims: the layout.
        processes: JAX's index of each process of torch.distributed.
        devices_per_process: devices of each process, which are consecutive ranks.

    Raises:
        ValueError: two processes have the same index.
    """
    return mesh_of(dims, _devices_of(processes, jax.devices(), devices_per_process))


def mesh_of(dims: ParallelDims, devices: Sequence[jax.Device]) -> Mesh:
    """Return the mesh of a layout, of one device for each rank."""
    spread = _expert_ranks(dims)
    shape = (dims.dp_replicate, dims.dp_shard // spread, spread, dims.cp, dims.tp)
    return Mesh(np.array(devices, dtype=object).reshape(shape), AXES)


def _expert_ranks(dims: ParallelDims) -> int:
    """Return over how many ranks of ``d`` experts are spread. With a layout of experts apart, they are over the ranks of ``t``, too."""
    return dims.ep if dims.expert_tp == dims.tp else dims.ep // dims.tp


def _devices_of(processes: Sequence[int], devices: Sequence[jax.Device], each: int = 1) -> list[jax.Device]:
    """Return the device of each rank: the first ``each`` devices of every process, by their ids."""
    if len(set(processes)) < len(processes):
        raise ValueError(
            f"the ranks are the processes {', '.join(map(str, processes))} of JAX: those with the same index do not see each other's devices; "
            "on TPUs, set TPU_PROCESS_ADDRESSES and TPU_PROCESS_BOUNDS for each process"
        )
    by_process: dict[int, list[jax.Device]] = {index: [] for index in processes}
    for device in sorted(devices, key=lambda device: device.id):
        by_process.get(device.process_index, []).append(device)
    return [device for index in processes for device in by_process[index][:each]]


def stored_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Return how an array of parameters is divided.

    Matrices are divided over ``tp`` as their product is (Shoeybi et al., 2019), and in shards along the other dimension. Axes that do not
    divide their dimension are left out.
    """
    spec: list[str | tuple[str, ...] | None] = [None] * len(shape)
    if name in (EMBEDDING, HEAD) or name.endswith(_BY_ROWS):
        spec[-2:] = "tp", SHARDS
    elif name.endswith(_BY_COLUMNS):
        spec[-2:] = SHARDS, "tp"
    elif name.endswith(EXPERTS):
        spec[-3:] = expert_axes(mesh, shape[-3]), None, ("dp", "cp")
    elif name == VALUE_WEIGHT:
        spec[-1] = SHARDS
    return PartitionSpec(
        *(axes if axes and size % ways(mesh, axes) == 0 else None for axes, size in zip(spec, shape, strict=True))
    )


def ways(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...]) -> int:
    """Return into how many parts a dimension over these axes is divided."""
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def expert_axes(mesh: Mesh, n_experts: int) -> tuple[str, ...]:
    """Return the axes over which experts are spread: ``tp`` among them, if it divides them."""
    return ("ep", "tp") if n_experts % ways(mesh, ("ep", "tp")) == 0 else ("ep",)


def check_experts_of(dims: ParallelDims, n_experts: int | None) -> None:
    """Raise if experts cannot be spread as a layout says.

    Args:
        n_experts: experts of a layer; ``None`` for a dense model.

    Raises:
        ValueError: names the layout and the way out.
    """
    if dims.expert_tp != dims.tp and (dims.expert_tp > 1 or dims.ep % dims.tp):
        raise ValueError(
            f"backend = '{dims}': the JAX engine has whole experts on the ffn side, over a multiple of the tensor-parallel ranks: "
            "write t1 there, and an e that t divides"
        )
    if dims.ep == 1:
        return
    if n_experts is None:
        raise ValueError(f"backend = '{dims}': the model has no experts; use d for e")
    if n_experts % dims.ep:
        raise ValueError(
            f"backend = '{dims}': {n_experts} experts cannot be spread over {dims.ep} ranks; choose an e that divides"
        )
    if dims.dp_shard % _expert_ranks(dims):
        raise ValueError(
            f"backend = '{dims}': the JAX engine spreads experts over ranks of d and t, and d{dims.dp_shard} has no groups of "
            f"{_expert_ranks(dims)}; raise d, or choose a smaller e"
        )


def gathered_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the placement of the array in a product: its shards gathered."""
    return PartitionSpec(*(None if axes == SHARDS else axes for axes in spec))


def row_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the placement of one row of an array over layers."""
    return PartitionSpec(*spec[1:])


def bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    """Return an index of JAX with explicit bounds."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape, strict=True))


def local_boxes(array: Array) -> list[tuple[Box, Any]]:
    """Return this process's shards of an array, each with its box, without those that another device holds, too."""
    return [
        (bounds(shard.index, array.shape), shard.data) for shard in array.addressable_shards if shard.replica_id == 0
    ]


def distinct_shards(array: Array) -> list[tuple[Box, Any]]:
    """Return this process's shards of an array, each with its box: in ascending order, and one of equal ones."""
    return distinct((bounds(shard.index, array.shape), shard.data) for shard in array.addressable_shards)


def distinct(boxes: Iterable[tuple[Box, _T]]) -> list[tuple[Box, _T]]:
    """Return boxes with their values in ascending order, and one of equal boxes."""
    by_key = {box_key(box): (box, values) for box, values in boxes}
    return [by_key[key] for key in sorted(by_key)]


def box_key(box: Box) -> tuple[tuple[int, int], ...]:
    """Return a box as a value that can be compared."""
    return tuple((s.start, s.stop) for s in box)


def from_boxes(shape: tuple[int, ...], sharding: Sharding, boxes: Sequence[tuple[Box, np.ndarray]]) -> Array:
    """Return an array, of which each process has the values in the boxes of its devices.

    Args:
        shape, sharding: of the array.
        boxes: boxes of this process's devices, each once, with values that must not be changed later.
    """
    values = {box_key(box): value for box, value in boxes}
    return jax.make_array_from_callback(shape, sharding, lambda index: values[box_key(bounds(index, shape))])


def host_view(array: Array) -> torch.Tensor:
    """Return an array of this process in host memory: on a CPU its own memory, which must not be written to."""
    if array.platform() == "cpu":
        return torch.from_dlpack(array)
    values = np.array(array)
    if values.dtype == jax.numpy.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def device_view(array: Array) -> torch.Tensor:
    """Return an array of this process where it is, if JAX lends that memory, and in host memory otherwise, as for a TPU. Read-only."""
    return torch.from_dlpack(array) if array.platform() in ("cpu", "gpu") else host_view(array)


def to_torch(array: Array) -> torch.Tensor:
    """Return a copy of an array of this process; see :func:`device_view`."""
    return device_view(array).clone()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor in host memory. numpy has bfloat16 from JAX's package ml_dtypes."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    return host.numpy()
