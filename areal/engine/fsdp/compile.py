"""``torch.compile`` layer by layer, for token streams of any length.

Packed attention reads the sequence lengths on the host, and experts read their numbers of tokens. A graph would
contain the values of one batch and fit no other. Both stay outside, and a layer is compiled into the graphs between
them. Graphs are shared by all layers of a class and by all lengths: only dimensions that count tokens or sequences
are symbolic. ``dynamic=True`` would make every dimension symbolic, and every number passed between graphs, which
takes four times as long to trace.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils import _pytree as pytree

_Forward = Callable[..., Any]


def compile_layers(layers: Sequence[nn.Module], backend: str, selective: Sequence[nn.Module] = ()) -> None:
    """Compile the forward of each layer, in place, at its first call.

    Hooks and later wrappers of a layer's forward are not compiled.

    Args:
        layers: layers of one engine, which share graphs.
        backend: name of a ``torch.compile`` backend.
        selective: those of the layers whose graphs compute again in the backward what is neither a matrix product nor a reduction. Attention
            kernels and experts are between the graphs, and keep what their backward needs.
    """
    plain, recomputing = _Compiled(backend), _Compiled(_recomputing(backend))
    chosen = set(selective)
    for layer in layers:
        compiled = recomputing if layer in chosen else plain
        for module in layer.modules():
            # Experts split tokens by data-dependent counts: the module stays eager.
            if _has_experts(module):
                module.forward = torch.compiler.disable(module.forward)
            # Attention is compiled separately: one graph each for the projections before and after the packed kernel.
            elif module is layer or _is_attention(module):
                module.forward = compiled.entry(module)


def _recomputing(backend: str) -> Callable[..., Any]:
    """Return a backend whose graphs save matrix products, reductions and their own inputs alone.

    The partitioner of AOTAutograd saves the smallest set of tensors from which the backward can be computed, and results that it considers
    costly to compute again. With this option these are matrix products and reductions only.
    """

    def compile_graph(*args: Any, **options: Any) -> Any:
        with functorch_config.patch(aggressive_recomputation=True):
            return torch._dynamo.lookup_backend(backend)(*args, **options)

    return compile_graph


class _Compiled:
    """The compiled forward of each module class, shared by all layers of an engine.

    Args:
        backend: name of a ``torch.compile`` backend, or a backend.
    """

    def __init__(self, backend: str | Callable[..., Any]) -> None:
        self._backend = backend
        self._forwards: dict[_Forward, _Forward] = {}

    def entry(self, module: nn.Module) -> _Forward:
        """Return the compiled forward of a module. A call from another graph ends that graph."""
        function = _uncompiled_forward(type(module))
        if function not in self._forwards:
            # Dynamo stores graphs per code object, and limits them to 8. A copy of the code keeps engines
            # independent.
            self._forwards[function] = torch.compile(_copy_function(function), backend=self._backend)
        forward = self._forwards[function]

        @torch.compiler.disable
        def run(*args: Any, **options: Any) -> Any:
            _mark_lengths((args, options))
            out = forward(module, *args, **options)
            _mark_lengths(out)
            return out

        return run


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention layer of transformers: these have the attribute ``is_causal``."""
    return hasattr(module, "is_causal")


def _has_experts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "experts", None), nn.Module)


def _uncompiled_forward(kind: type[nn.Module]) -> Any:
    """Return the forward of a class without transformers' own checkpointing wrapper.

    The wrapper is inactive, but dynamo would trace the layer once more for it.
    """
    function: Any = kind.forward
    while function.__code__.co_name == "forward_with_checkpointing":
        function = function.__wrapped__
    return function


def _copy_function(function: Any) -> Any:
    # A new code object with the same content, because dynamo identifies functions by it.
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _mark_lengths(tree: Any) -> None:
    """Mark the dimensions that count tokens or sequences as dynamic.

    These are all but the last dimension of hidden states, and all dimensions of ids and masks.
    """
    for x in pytree.tree_leaves(tree):
        if isinstance(x, Tensor):
            counted = x.dim() - 1 if x.is_floating_point() and x.dim() < 4 else x.dim()
            for dim in range(counted):
                # Dynamo always specialises on size 1.
                if x.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(x, dim)
