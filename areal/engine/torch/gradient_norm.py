"""Norm of all gradients over all ranks, and their scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal.engine.optimizer import sum_of_squares
from areal.utils.dtensor import collective_device, local_part


def global_norm(parameters: Sequence[nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """Return the L2 norm of all gradients over all ranks, a scalar that is equal on every rank.

    Each element counts once.

    Squares are summed in float64, so that the norm does not depend on the sharding.

    Args:
        parameters: parameters of this rank, without those that another pipeline stage counts.
        stages: process group of the pipeline, or ``None``.
    """
    # Parameters that are sharded over the same groups share one all-reduce.
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_groups[_shard_groups(parameter.grad)].append(local_part(parameter.grad))
    device = collective_device(parameters[0])
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, grads in by_groups.items():
        # With CPU offload, gradients are on the host, but collectives need the device.
        squares = sum_of_squares(grads, grads[0].device).to(device)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    # Stages have different parameters: add their squares.
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def scale(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a factor, in place."""
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(grads, factor)


def _shard_groups(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a gradient's elements are divided.

    Replicas are left out, so that they do not count twice.
    """
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(grad.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )
