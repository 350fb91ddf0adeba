"""Run Megatron-Core without CUDA, by mapping its CUDA calls to torch's CPU equivalents.

Megatron's own logic is unchanged. It queries CUDA devices, streams, events and random states, uses the literal
``device="cuda"``, and compares ``tensor.type()`` with names of CUDA types: this module answers these on the CPU. It
also emulates gather and scatter with unequal sizes, which NCCL supports and gloo does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors

from areal.utils import platform

_installed = False


def install() -> None:
    """Map the CUDA calls of Megatron-Core to the CPU, once per process.

    Raises:
        RuntimeError: CUDA is available, so that no mapping is needed.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError(
            "CUDA is available: Megatron-Core runs on it as it is, and this module must not be installed"
        )
    if _installed:
        return
    _map_devices_and_streams()
    _map_random_states()
    # torch.device("meta") as a context patches the functions that exist at its first use: let it record the
    # originals.
    _device_constructors()
    for name in ("zeros", "ones", "empty", "tensor", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Collectives that gloo lacks.
    dist.all_gather = _all_gather_any_sizes(dist.all_gather)
    dist.reduce_scatter = _reduce_scatter_any_sizes(dist.reduce_scatter)
    # On the CPU .cuda() is a no-op; type names get the prefix that Megatron compares with.
    Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign, assignment]
    Tensor.type = _type_as_megatron_expects(Tensor.type)  # type: ignore[method-assign]
    _installed = True


def finish(random: ModuleType, moe_utils: ModuleType, token_dispatcher: ModuleType) -> None:
    """Apply the mappings that need Megatron-Core to be imported.

    These are its copy of a CUDA call, and two gaps of its mixture of experts: without Transformer Engine, Megatron
    compares an undefined name with ``None``, and it converts split sizes to numpy only for tensors on a GPU.

    Args:
        random, moe_utils, token_dispatcher: modules of Megatron-Core.
    """
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)  # type: ignore[attr-defined]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host  # type: ignore[attr-defined]


def _map_devices_and_streams() -> None:
    torch.cuda.current_device = _device  # type: ignore[assignment]
    for name in ("current_stream", "stream", "Event"):
        setattr(torch.cuda, name, getattr(torch.cpu, name))
    # A new function, because dynamo has a table of functions in which each may occur once.
    torch.cuda.synchronize = lambda device=None: torch.cpu.synchronize()
    torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
    torch.cuda.default_stream = torch.cpu.current_stream  # type: ignore[assignment]


def _map_random_states() -> None:
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[assignment]


class _Stream(torch.cpu.Stream):
    """CPU stream whose ``record_event`` returns an event instead of ``None``, as Megatron expects."""

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cpu.Event()


def _device() -> str:
    """Return the device of Megatron-Core's tensors: the CPU, or the meta device in a plan."""
    return "meta" if platform.is_planned() else "cpu"


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **options: Any) -> Tensor:
        wanted = options.get("device")
        # Only calls from Megatron are redirected: other code keeps torch's behaviour.
        if wanted is not None and _asked_by_megatron() and torch.device(wanted).type == "cuda":
            options["device"] = _device()
            options.pop("pin_memory", None)
        return factory(*args, **options)

    return on_cpu


def _asked_by_megatron() -> bool:
    """Return whether Megatron-Core called the function that calls this one, directly or through one more wrapper."""
    callers = (sys._getframe(2), sys._getframe(2).f_back)
    return any(frame is not None and frame.f_globals.get("__name__", "").startswith("megatron.") for frame in callers)


def _type_as_megatron_expects(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``tensor.type()`` return the name of the CUDA type, for calls from Megatron only."""

    @functools.wraps(original)
    def type_of(self: Tensor, *args: Any, **options: Any) -> Any:
        answer = original(self, *args, **options)
        if not args and not options and _asked_by_megatron():
            return f"torch.cuda.{answer.rpartition('.')[2]}"
        return answer

    return type_of


def _all_gather_any_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Emulate an all-gather with unequal sizes by an all-to-all."""

    @functools.wraps(original)
    def all_gather(tensors: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({x.shape for x in tensors}) == 1:
            return original(tensors, tensor, group=group, async_op=async_op)
        # Every rank sends its tensor to all ranks.
        sizes = [len(x) for x in tensors]
        out = tensor.new_empty(sum(sizes), *tensor.shape[1:])
        dist.all_to_all_single(out, tensor.repeat(len(sizes), *(1,) * (tensor.dim() - 1)), sizes, group=group)
        for x, received in zip(tensors, out.split(sizes), strict=True):
            x.copy_(received)
        return None

    return all_gather


def _reduce_scatter_any_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Emulate a reduce-scatter with unequal sizes by an all-to-all and a local sum."""

    @functools.wraps(original)
    def reduce_scatter(
        output: Tensor, tensors: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        # Every rank receives one tensor from each rank, and sums them.
        sizes = [len(x) for x in tensors]
        if len({x.shape for x in tensors}) == 1 or op != dist.ReduceOp.SUM:
            return original(output, tensors, op=op, group=group, async_op=async_op)
        received = output.new_empty(len(sizes), *output.shape)
        dist.all_to_all_single(
            received.flatten(0, 1), torch.cat(tensors), [len(output)] * len(sizes), sizes, group=group
        )
        output.copy_(received.sum(0))
        return None

    return reduce_scatter


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert split sizes to numpy. They already are on the host."""
    return tensor.numpy() if isinstance(tensor, Tensor) and as_numpy else tensor
