"""Gradients of sharded parameters: when they are reduced, their global norm, and scaling."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal.engine.optimizer import sum_of_squares
from areal.utils.dtensor import collective_device, local_part
from areal.utils.profiling.phase_timer import PhaseTimer


def gradient_sync_hook(model: nn.Module, *, every: bool) -> Callable[[bool], None]:
    """What to call before each backward, with whether it is the last of the call: reduces then, or on every one.

    Raises:
        ValueError: the model is not sharded.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not an FSDP module: call parallelize() first")

    def before_backward(last: bool) -> None:
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or every)

    return before_backward


def time_reductions(model: nn.Module, timer: PhaseTimer) -> None:
    """Count what FSDP does to reduce gradients as the phase ``reduce``, not as a part of the backward around it. In place.

    That is the end of each group's backward, when it reduces, and the wait for what was started. It takes as long as the host needs where
    collectives run on the host, and as the computing stream waits where they have streams of their own.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for name in ("post_backward", "finalize_backward"):
                    setattr(group, name, _timed(getattr(group, name), group, timer))


def _timed(inner: Callable[..., None], group: Any, timer: PhaseTimer) -> Callable[..., None]:
    @functools.wraps(inner)
    def timed(*args: Any) -> None:
        with timer.phase("reduce") if group.reduce_grads else contextlib.nullcontext():
            inner(*args)

    return timed


def discard_unreduced(module: FSDPModule) -> None:
    """Forget what micro-batches have added to gathered gradients since the last reduction."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def accumulate(module: FSDPModule) -> None:
    """Move new gradients of gathered weights to their sums over micro-batches, as FSDP does after a backward of its own."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def global_norm(parameters: Sequence[nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """L2 norm of all gradients over all ranks, each element counted once; a scalar, equal on every rank.

    Squares are summed in float64, so that the norm does not depend on how tensors are cut.

    Args:
        parameters: of this rank, with none that another pipeline stage counts.
        stages: the ranks of the pipeline, or ``None``.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_groups[_shard_groups(parameter.grad)].append(local_part(parameter.grad))
    device = collective_device(parameters[0])
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, grads in by_groups.items():
        squares = sum_of_squares(grads, grads[0].device).to(device)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def scale(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(grads, factor)


def _shard_groups(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which a gradient's elements are spread; replicas are not counted twice."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(grad.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )
