"""Gradients of sharded parameters: when they are reduced, and how long that takes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from areal.api.config import TrainEngineConfig, torch_dtype
from areal.engine.fsdp.pipeline.tied_embedding import TiedGradients
from areal.engine.optimizer import GradientState
from areal.engine.torch.offload import ShardedOffload
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import local_part
from areal.utils.profiling.phase_timer import PhaseTimer
from areal.utils.releases import accumulate_gradients, drop_accumulated, fsdp_param_groups

_ONCE, _EACH = "once per call", "on each micro-batch"

_LARGEST_FRACTION = 0.25
"""Fraction of the memory without sharded state that unsharded gradients may take with ``grad_sync="auto"``."""


class FSDPGradients:
    """The gradients of a sharded model. Implements :class:`areal.engine.components.Gradients`.

    Args:
        tied: gradients of an embedding that two pipeline stages have; ``None`` without a pipeline.
        memory: owner of the shards' gradients.
    """

    def __init__(self, tied: TiedGradients | None, memory: ShardedOffload) -> None:
        self._tied, self._memory = tied, memory
        self.state = GradientState()

    def before_backward(self) -> None:
        if self._tied is not None:
            self._tied.before_backward()

    def finalize(self) -> None:
        """Complete the reduction. Backwards have reduced over data-parallel ranks; two stages may have to sum a tied embedding."""
        if self._tied is not None:
            self._tied.sum()

    def zero(self) -> None:
        self._memory.discard_grads()


@dataclass(frozen=True)
class GradientSync:
    """When the gradients of a call are reduced.

    Attributes:
        every: on each micro-batch, instead of on the last one.
        reason: description for the log.
    """

    every: bool
    reason: str

    @classmethod
    def choose(cls, model: nn.Module, config: TrainEngineConfig, memory: int, control: ControlPlane) -> GradientSync:
        """Return the configured choice; with ``"auto"``, choose by the size of the model. Collective.

        Reducing once per call keeps the gradients of all parameters unsharded between micro-batches. That takes too much memory if they
        need more than a quarter of what the sharded state leaves.

        Args:
            model: model of this rank, sharded by FSDP.
            config: configuration of the engine.
            memory: bytes of a rank's device, equal on all ranks.
            control: control plane over all ranks, whose shards may differ in size.
        """
        if not depends_on_size(config):
            every = config.grad_sync == "micro_batch"
            return cls(every, _EACH if every else _ONCE)
        sharded, unsharded = map(max, zip(*control.gather(trained_elements(model)), strict=True))
        return cls.by_size(config, sharded, unsharded, memory)

    @classmethod
    def by_size(cls, config: TrainEngineConfig, sharded: float, unsharded: float, memory: int) -> GradientSync:
        """Choose by the numbers of elements of :func:`trained_elements`. ``memory`` is that of :meth:`choose`."""
        # Shards of parameters, gradients and optimizer state, and the additional bytes of unsharded gradients.
        master, reduced = torch_dtype(config.master_dtype).itemsize, torch_dtype(config.grad_reduce_dtype).itemsize
        moment = 2 if config.fsdp.optimizer_state_dtype == "bfloat16" else master
        n_moments = 2 if config.optimizer is not None and config.optimizer.type == "adamw" else 1
        sharded = 0 if config.fsdp.cpu_offload else sharded
        state = sharded * (master + reduced + n_moments * moment)
        extra, room = (unsharded - sharded) * reduced, max(memory - state, 0)
        every = extra > room * _LARGEST_FRACTION
        text = f"unsharded gradients take {extra / 2**30:.2f} GiB more, sharded state leaves {room / 2**30:.2f} GiB"
        return cls(every, f"{_EACH if every else _ONCE}, chosen by size: {text}")


def depends_on_size(config: TrainEngineConfig) -> bool:
    """Return whether the size of the model decides when gradients are reduced."""
    # A pipeline reduces at the end of a call. Adapters are reduced once per optimizer step.
    alone = config.dims.pp == 1 and config.lora is None and config.optimizer is not None
    return config.grad_sync == "auto" and alone


def trained_elements(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of elements of this rank's shards that are trained, and of the parameters that FSDP gathers from them."""
    groups = [
        group for module in model.modules() if isinstance(module, FSDPModule) for group in fsdp_param_groups(module)
    ]
    parameters = [x for group in groups for x in group.fsdp_params if x.sharded_param.requires_grad]
    return (
        sum(local_part(x.sharded_param).numel() for x in parameters),
        sum(x._orig_size.numel() for x in parameters),
    )


def gradient_sync_hook(model: nn.Module, *, every: bool) -> Callable[[bool], None]:
    """Return the function to call before each backward, with True for the last one of a call.

    Gradients are reduced in that one, or in each if ``every``.

    Raises:
        ValueError: the model is not sharded.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not an FSDP module: call parallelize() first")

    gathered: dict[FSDPModule, list[Any]] = {
        module: [parameter for group in fsdp_param_groups(module) for parameter in group.fsdp_params]
        for module in model.modules()
        if isinstance(module, FSDPModule)
    }

    def before_backward(last: bool) -> None:
        _gather_unused(gathered)
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or every)

    return before_backward


def _gather_unused(gathered: Mapping[FSDPModule, Sequence[Any]]) -> None:
    """Gather and release layers that no forward has run, such as those of images: FSDP accumulates without asking.

    Args:
        gathered: module -> the parameters that FSDP gathers for it.
    """
    for module, parameters in gathered.items():
        if not all(hasattr(parameter, "_unsharded_param") for parameter in parameters):
            module.unshard()
            module.reshard()


def time_reductions(model: nn.Module, timer: PhaseTimer) -> None:
    """Measure FSDP's gradient reductions as the phase ``reduce``, separate from the surrounding backward. In place.

    The phase covers the end of each parameter group's backward, if it reduces, and the wait for pending reductions.
    It measures host time for collectives that run on the host, and the wait of the compute stream for collectives
    on other streams.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_param_groups(module):
                # FSDP offers no hook around its reductions: wrap the methods of each group.
                for name in ("post_backward", "finalize_backward"):
                    setattr(group, name, _timed(getattr(group, name), group, timer))


def _timed(inner: Callable[..., None], group: Any, timer: PhaseTimer) -> Callable[..., None]:
    @functools.wraps(inner)
    def timed(*args: Any) -> None:
        with timer.phase("reduce") if group.reduce_grads else contextlib.nullcontext():
            inner(*args)

    return timed


def discard_unreduced(module: FSDPModule) -> None:
    """Discard the unsharded gradients accumulated since the last reduction."""
    for group in fsdp_param_groups(module):
        for parameter in group.fsdp_params:
            drop_accumulated(parameter)
            # The unsharded parameter exists only after the first gather.
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def accumulate(module: FSDPModule) -> None:
    """Add new gradients of gathered weights to their sums over micro-batches, as FSDP does after its own backward."""
    for group in fsdp_param_groups(module):
        accumulate_gradients(group)
