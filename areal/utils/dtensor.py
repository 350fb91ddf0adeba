"""Helpers for distributed tensors: boxes, local shards, full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)

from areal.utils import platform
from areal.utils.releases import fsdp_param_groups

Box = tuple[slice, ...]
"""One slice with explicit bounds for each dimension."""


def full_box(shape: tuple[int, ...] | torch.Size) -> Box:
    """Return the box that covers a full tensor of the given shape."""
    return tuple(slice(0, n) for n in shape)


def local_part(tensor: Tensor | None, gradient: Placement | None = None) -> Any:
    """Return this rank's shard of a distributed tensor, differentiably; a plain tensor is returned as it is.

    Args:
        tensor: the tensor, or ``None``.
        gradient: placement of the gradient. Defaults to the placement of the tensor. ``Partial()``: this rank's gradient is a
            summand.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])


def take_rows(x: Tensor, rows: Sequence[slice]) -> Tensor:
    """Return ranges of rows of a tensor, end to end; one range is a view."""
    return x[rows[0]] if len(rows) == 1 else torch.cat([x[some] for some in rows])


def reshard(model: nn.Module) -> None:
    """Reshard all parameters of an FSDP model. After a forward without a backward, those of the root are still gathered.

    Weights that were gathered ahead of a layer that did not run are released: the next forward would use their old values.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP reshards completed gathers only: complete a pending one, which is without communication.
            if any(group._all_gather_result is not None for group in fsdp_param_groups(module)):
                module.unshard()
            module.reshard()


def local_shard(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return this rank's shard of a tensor, detached and in the same memory, and its box in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), full_box(tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # The bounds are computed from mesh and placements, without communication. Check them against the actual shard.
    with torch.no_grad():
        local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise RuntimeError(
            f"a shard of {tuple(local.shape)} where {tensor.placements} of {tuple(tensor.shape)} gives {shape}"
        )
    return local, tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def shard_box(tensor: Tensor, rank: int) -> Box:
    """Return the box of another rank's shard in the full tensor. That rank may be in another mesh with the same axes."""
    if not isinstance(tensor, DTensor):
        return full_box(tensor.shape)
    # Ranks of all meshes are a grid: along an axis, neighbours are equally far from each other.
    ranks, coordinate = tensor.device_mesh.mesh, []
    for axis, size in enumerate(ranks.shape):
        line = ranks.movedim(axis, 0).reshape(size, -1)[:, 0].tolist()
        coordinate.append(rank // (line[1] - line[0]) % size if size > 1 else 0)
    sizes = tuple(ranks.shape)
    shape, start = _compute_local_shape_and_global_offset(tensor.shape, sizes, coordinate, tensor.placements)
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


@torch.no_grad()
def empty_like(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor with the same shape, placements and mesh.

    ``torch.empty_like`` caches results by equality of meshes, and may return a tensor on the mesh of a destroyed engine.
    """
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device, dtype=dtype)
    return _with_local(tensor, torch.empty_like(tensor.to_local(), device=device, dtype=dtype))


def gathered_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is gathered that is then cast to ``wanted``: the one of fewer bytes.

    Rounding is elementwise, so that a cast before the gather gives the same bits as one after it.
    """
    narrower = wanted in _CAST_BEFORE_GATHER and own.is_floating_point and wanted.itemsize < own.itemsize
    return wanted if wanted is not None and narrower else own


_CAST_BEFORE_GATHER = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that collectives of every backend have."""


@torch.no_grad()
def full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gather the full tensor, detached, in new memory on the device of its mesh. Collective.

    Args:
        tensor: the tensor.
        dtype: dtype of the result, in which shards are gathered. Defaults to the dtype of the tensor.
    """
    dtype = tensor.dtype if dtype is None else dtype
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(dtype, copy=True)
    # Shards on the host are moved first: collectives run on the mesh's device. In a narrower dtype fewer bytes are moved and sent.
    own = tensor.to_local()
    local = own.to(dtype).to(collective_device(tensor))
    full = (tensor if local is own else _with_local(tensor, local)).full_tensor().detach()
    # A replicated tensor is returned without a copy: its memory is the parameter's.
    aliased = full.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
    return full.clone() if aliased else full


def collective_device(tensor: Tensor) -> torch.device:
    """Return the device for collectives on a tensor, whose shards may be on the host."""
    if not isinstance(tensor, DTensor) or tensor.device.type == tensor.device_mesh.device_type:
        return tensor.device
    return platform.current_device()


def _with_local(tensor: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
