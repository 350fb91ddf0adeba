"""The recurrent layers of transformers, packed: functions of this package in place of those that modeling files call.

Every modeling file with recurrent layers calls functions of the same few names, which it looks up in its own module at each call. They are
replaced there by functions that keep sequences apart while a packed model runs, and call the original otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal.engine.attention.context_parallel import AttentionLayout
from areal.engine.recurrence.chunks import ChunkSizes, RunChunks
from areal.engine.recurrence.head_exchange import HeadExchange
from areal.engine.recurrence.kernels import operations_on
from areal.engine.recurrence.state_space import positive_steps, selective_scan

_running: ContextVar[AttentionLayout | None] = ContextVar("layout of the running forward", default=None)


@contextlib.contextmanager
def running(layout: AttentionLayout | None) -> Iterator[None]:
    """Let recurrent layers inside compute the packed sequences of a layout. ``None``: as transformers computes them."""
    token = _running.set(layout)
    try:
        yield
    finally:
        _running.reset(token)


def running_layout() -> AttentionLayout | None:
    """Return the layout of the packed sequences that are running; ``None`` if none are."""
    return _running.get()


def keep_running() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function whose context has the layout that is running now: a layer is recomputed after its forward has ended."""
    return functools.partial(running, _running.get())


def replace_functions(model: PreTrainedModel) -> ChunkSizes | None:
    """Replace the functions that the recurrent layers of a model call, in the module of its class. Can be called again.

    Returns:
        What the layers need of a stream; ``None`` for a model without such functions.
    """
    module = sys.modules[type(model).__module__]
    names = [name for name in (*_PACKED, *_FUSED) if hasattr(module, name)]
    for name in names:
        original = getattr(module, name)
        if not isinstance(original, _Replaced):
            setattr(module, name, _Replaced(original, _PACKED.get(name)))
    taps = [each.kernel_size[0] for each in model.modules() if isinstance(each, nn.Conv1d)]
    if not names or not taps:
        return None
    return ChunkSizes(tokens=min(_CHUNKS.get(name, _LARGEST_CHUNK) for name in names), context=max(taps) - 1)


class _Replaced:
    """A function of a modeling module that keeps packed sequences apart.

    Args:
        original: the function of transformers.
        packed: takes the layout, its chunks, and the arguments of ``original``. ``None`` for a fused function: its layer calls the others
            where it returns ``None``.
    """

    def __init__(self, original: Callable[..., Any], packed: Callable[..., Any] | None) -> None:
        functools.update_wrapper(self, original)
        self._original, self._packed = original, packed

    @torch.compiler.disable
    def __call__(self, *args: Any, **options: Any) -> Any:
        layout = _running.get()
        if layout is None:
            return self._original(*args, **options)
        if layout.chunks is None:
            raise ValueError(
                f"{self._original.__name__}: the layout of packed sequences was made for a model without it"
            )
        return None if self._packed is None else self._packed(layout, layout.chunks, *args, **options)


def _convolution(
    layout: AttentionLayout,
    chunks: RunChunks,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    ranks = HeadExchange(layout.cp)
    (x,) = ranks.whole([hidden_states[0].transpose(0, 1)])
    bias = None if bias is None else ranks.part(bias)
    run = operations_on(x.device).convolution
    out = run(chunks, x.transpose(0, 1)[None], ranks.part(weight), bias, activation)
    return ranks.own(out[0].transpose(0, 1)).transpose(0, 1)[None]


def _delta_rule(
    layout: AttentionLayout,
    chunks: RunChunks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    ranks = HeadExchange(layout.cp)
    heads = ranks.whole([x[0] for x in (query, key, value, g, beta)])
    out = operations_on(value.device).delta_rule(chunks, *heads, normalize=use_qk_l2norm_in_kernel)
    return ranks.own(out)[None], None


def _mamba2(
    layout: AttentionLayout,
    chunks: RunChunks,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    ranks = HeadExchange(layout.cp)
    steps = positive_steps(dt, dt_bias, softplus=dt_softplus, limits=dt_limit)
    x, steps, b, c = ranks.whole([each[0] for each in (hidden_states, steps, B, C)])
    D = None if D is None else ranks.part(D)
    return ranks.own(operations_on(x.device).scan(chunks, x, steps, ranks.part(A), b, c, D))[None]


def _mamba1(
    layout: AttentionLayout,
    chunks: RunChunks,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    ranks = HeadExchange(layout.cp)
    # transformers has channels before tokens. All channels share B and C, which are one head.
    x, dt, B, C = (each[0].transpose(0, 1) for each in (hidden_states, dt, B, C))
    steps = positive_steps(dt, delta_bias, softplus=delta_softplus)
    x, steps, b, c = ranks.whole([x, steps, B.unsqueeze(1), C.unsqueeze(1)])
    D = None if D is None else ranks.part(D)
    out = selective_scan(chunks, x, steps, ranks.part(A), b.squeeze(1), c.squeeze(1), D)
    out = ranks.own(out).transpose(0, 1)[None]
    return out if z is None else out * F.silu(z)


_PACKED: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
"""Packed functions by the names that modeling files call."""

_FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Functions that compute a whole layer, and would know nothing of sequences."""

_CHUNKS: Mapping[str, int] = {
    "torch_chunk_gated_delta_rule": 32,
    "chunk_kimi_delta_attention": 8,  # computes the decay between all pairs of tokens in each channel
    "mamba_selective_scan": 1,
}
_LARGEST_CHUNK = 64
"""Tokens of a chunk: the fastest of those that were measured on a CPU. Mamba-1 has no products of matrices inside of a chunk."""
