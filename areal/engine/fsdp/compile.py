"""``torch.compile`` layer by layer, for token streams of any length.

Attention over packed sequences asks for their lengths on the host, and experts for their shares of the tokens: a graph would hold one answer,
and fit no other batch. Both stay outside, and a layer becomes graphs around them. All layers of a kind share these, and all lengths: only
dimensions that count tokens or sequences are symbols. ``dynamic=True`` would make one of every dimension, and of every number that crosses
from graph to graph: graphs then take four times as long to find.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_Forward = Callable[..., Any]


def compile_layers(layers: Sequence[nn.Module], backend: str) -> None:
    """Compile the forward of each layer, in place, at its first call. Hooks and what later wraps a layer's forward stay outside.

    Args:
        layers: of one engine, which share graphs.
        backend: by the name under which ``torch.compile`` knows it.
    """
    compiled = _Compiled(backend)
    for layer in layers:
        for module in layer.modules():
            if _has_experts(module):
                module.forward = torch.compiler.disable(module.forward)
            elif module is layer or _is_attention(module):
                module.forward = compiled.entry(module)


class _Compiled:
    """The compiled forward of each class of modules: one for all layers, and apart from those of other engines.

    Args:
        backend: of ``torch.compile``.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._forwards: dict[_Forward, _Forward] = {}

    def entry(self, module: nn.Module) -> _Forward:
        """The forward of a module, as it is called from code that is not compiled, or from another graph, which ends there."""
        function = _function_of(type(module))
        if function not in self._forwards:
            # Dynamo keeps graphs, and counts them against its limit of 8, by code object: with a copy, engines do not use up each other's.
            self._forwards[function] = torch.compile(_copy(function), backend=self._backend)
        forward = self._forwards[function]

        @torch.compiler.disable
        def run(*args: Any, **options: Any) -> Any:
            _mark_lengths((args, options))
            out = forward(module, *args, **options)
            _mark_lengths(out)
            return out

        return run


def _is_attention(module: nn.Module) -> bool:
    """As transformers has them: each says whether it is causal."""
    return hasattr(module, "is_causal")


def _has_experts(module: nn.Module) -> bool:
    return isinstance(getattr(module, "experts", None), nn.Module)


def _function_of(kind: type[nn.Module]) -> Any:
    """The forward of a class, without transformers' own checkpointing around it, which is off: dynamo would trace a layer once more for it."""
    function: Any = kind.forward
    while function.__code__.co_name == "forward_with_checkpointing":
        function = function.__wrapped__
    return function


def _copy(function: Any) -> Any:
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
    """Make symbols of the dimensions that count tokens or sequences: all but the last of hidden states, all of ids and masks."""
    for x in pytree.tree_leaves(tree):
        if isinstance(x, Tensor):
            counted = x.dim() - 1 if x.is_floating_point() and x.dim() < 4 else x.dim()
            for dim in range(counted):
                if x.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(x, dim)
