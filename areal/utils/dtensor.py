"""Helpers for distributed tensors: boxes, local shards, full tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from areal.utils import platform

Box = tuple[slice, ...]
"""One slice with explicit bounds for each dimension."""


def full_box(shape: tuple[int, ...] | torch.Size) -> Box:
    """The box that is all of a tensor of that shape."""
    return tuple(slice(0, n) for n in shape)


def local_part(tensor: Tensor | None, gradient: Placement | None = None) -> Any:
    """This rank's part of a distributed tensor; all of a plain one.

    Args:
        gradient: what this rank's gradient of it is, where not of its own part alone.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])


def reshard(model: nn.Module) -> None:
    """Put every parameter back to its shards: a forward without a backward leaves the root's gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(tensor: Tensor) -> tuple[Tensor, Box]:
    """This rank's part of a tensor, sharing its memory, and where that part lies in the full one. A plain tensor is all there."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), full_box(tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    with torch.no_grad():
        local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise RuntimeError(
            f"a shard of {tuple(local.shape)} where {tensor.placements} of {tuple(tensor.shape)} gives {shape}"
        )
    return local, tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


@torch.no_grad()
def empty_like(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same layout over the same mesh, without values.

    torch's own ``empty_like`` may answer from a cache with the mesh of an engine that is gone, if that mesh was equal to this one.
    """
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device, dtype=dtype)
    return _with_local(tensor, torch.empty_like(tensor.to_local(), device=device, dtype=dtype))


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, detached, in memory of its own, on the device of its mesh. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    device = collective_device(tensor)
    if tensor.device != device:
        tensor = _with_local(tensor, tensor.to_local().to(device))
    full = tensor.full_tensor().detach()
    shares = full.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
    return full.clone() if shares else full


def collective_device(tensor: Tensor) -> torch.device:
    """Where collectives over a tensor's ranks run: its shards may be kept on the host."""
    if not isinstance(tensor, DTensor) or tensor.device.type == tensor.device_mesh.device_type:
        return tensor.device
    return platform.current_device()


def _with_local(tensor: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
