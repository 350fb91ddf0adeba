"""Activation checkpointing: the choice of activations that a layer keeps for its backward instead of recomputing them."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from areal.api.config import ActivationCheckpointing
from areal.engine.attention.recomputation import is_always_recomputed
from areal.engine.torch.activations.offload import Hooks

_aten = torch.ops.aten

_Context = AbstractContextManager[Any]
_Contexts = tuple[_Context, _Context]

Remember = Callable[[], Callable[[], AbstractContextManager[None]]]
"""Function of :attr:`RecomputedForward.remember`."""

_SAVED_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
    _aten._scaled_grouped_mm.default,
    _aten._flash_attention_forward.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""Matrix products and attention of torch."""

_SAVED_CUSTOM_OPS = (
    ("torch_attn", "_varlen_attn"),
    ("flash_attn", "_flash_attn_forward"),
    ("flash_attn", "_flash_attn_varlen_forward"),
    ("flash_attn_3", "_flash_attn_forward"),
    ("areal", "exchange_rows"),
    ("mkldnn", "_linear_pointwise"),
    ("areal", "openblas_mm"),
)
"""Attention kernels of a GPU, the exchanges of expert and context parallelism, and products on a CPU by other libraries.

A dispatch mode does not see the operations inside of them. Each exists only if its library was imported.
"""


def saved_ops() -> frozenset[Any]:
    """Return the operations that are expensive to recompute: matrix products, attention and all-to-alls.

    Norms, activations, rotary embeddings and sums are cheap and take most of the memory.
    """
    packets = (getattr(getattr(torch.ops, library), name, None) for library, name in _SAVED_CUSTOM_OPS)
    return frozenset({*_SAVED_OPS, *(packet.default for packet in packets if packet is not None)})


def recompute_layers(layers: Sequence[nn.Module], how: ActivationCheckpointing, fraction: float) -> None:
    """Make layers recompute their activations in the backward, in place.

    Args:
        layers: layers of the model.
        how: ``"none"``, ``"full"`` to keep only a layer's input, or ``"selective"`` to keep also the results of
            :func:`saved_ops`, except those in :func:`~areal.engine.attention.recomputation.always_recomputed`.
        fraction: float. Fraction of the layers, spread evenly.
    """
    if how == "none":
        return
    contexts = functools.partial(_selective_contexts, saved_ops()) if how == "selective" else None
    for layer in spread_evenly(layers, fraction):
        layer.forward = RecomputedForward(layer.forward, contexts)


def spread_evenly(layers: Sequence[nn.Module], fraction: float) -> list[nn.Module]:
    """Return a fraction of the layers: those at which the running count of returned layers reaches the next integer."""
    return [layer for number, layer in enumerate(layers) if int((number + 1) * fraction) > int(number * fraction)]


class RecomputedForward:
    """Forward of a layer that is recomputed in the backward.

    Args:
        inner: the layer's own forward.
        contexts: returns the contexts of the forward and of the recomputation.

    Attributes:
        remember: functions that are called in the forward. Each returns a function whose context surrounds the recomputation, and restores
            state which the layer reads.
        hooks: returns the functions that pack and unpack what the forward keeps; ``None`` keeps tensors on the device.
    """

    def __init__(self, inner: Callable[..., Any], contexts: Callable[[Hooks | None], _Contexts] | None) -> None:
        self._inner, self._contexts = inner, contexts
        self.remember: list[Remember] = []
        self.hooks: Callable[[], Hooks | None] = lambda: None

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.remember and self._contexts is None:
            return checkpoint(self._inner, *args, use_reentrant=False, **options)
        return checkpoint(self._inner, *args, use_reentrant=False, context_fn=self._both, **options)

    def _both(self) -> _Contexts:
        """Return the contexts of a call. The second one also restores what was remembered."""
        forward, again = (nullcontext(), nullcontext()) if self._contexts is None else self._contexts(self.hooks())
        return forward, _Restored([remember() for remember in self.remember], again) if self.remember else again


class _Restored(AbstractContextManager[None]):
    """Context of a recomputation inside of others. A second backward through the same layer enters it again."""

    def __init__(self, restore: Sequence[Callable[[], _Context]], inner: _Context) -> None:
        self._restore, self._inner = restore, inner
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for restore in self._restore:
            self._entered.enter_context(restore())
        self._entered.enter_context(self._inner)

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _selective_contexts(saved: frozenset[Any], hooks: Hooks | None) -> _Contexts:
    if hooks is not None:
        results = _PackedResults(hooks)
        return _SavedOpsOnly(_KeepResults(results), saved), _SavedOpsOnly(_TakeResults(results), saved)
    forward, again = create_selective_checkpoint_contexts(list(saved))
    return _SavedOpsOnly(forward, saved), _SavedOpsOnly(again, saved)


class _SavedOpsOnly(TorchDispatchMode):
    """Shows the selective-checkpoint mode only the operations to save.

    Other operations may differ between forward and recomputation: FSDP hooks within the layer gather weights only
    if they are not gathered already.
    """

    def __init__(self, mode: Any, saved: frozenset[Any]) -> None:
        super().__init__()
        self._mode, self._saved = mode, saved

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._saved and not is_always_recomputed():
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _PackedResults:
    """Results of operations of one forward, packed by hooks of saved tensors until the recomputation takes them.

    torch's modes for selective checkpointing keep results without asking such hooks.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._pack, self._unpack = hooks
        self._results: dict[Any, deque[Any]] = defaultdict(deque)  # by operation, in the order of its calls

    def add(self, func: Any, result: Any) -> None:
        """Keep the result of a call, without its graph."""

        def packed(x: Tensor) -> Callable[[], Tensor]:
            return functools.partial(self._unpack, self._pack(x.detach()))

        self._results[func].append(pytree.tree_map_only(Tensor, packed, result))

    def take(self, func: Any) -> Any:
        """Return the result of the next call of an operation.

        Raises:
            RuntimeError: there are more calls than in the forward, or a second recomputation.
        """
        if not self._results[func]:
            raise RuntimeError(f"{func} is called more often than in the forward, or the backward runs a second time")
        return pytree.tree_map_only(functools.partial, lambda unpack: unpack(), self._results[func].popleft())


class _KeepResults(TorchDispatchMode):
    """Keeps the results of all operations that it sees."""

    def __init__(self, results: _PackedResults) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._results.add(func, result)
        return result


class _TakeResults(TorchDispatchMode):
    """Replaces all operations that it sees by their kept results."""

    def __init__(self, results: _PackedResults) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._results.take(func)
