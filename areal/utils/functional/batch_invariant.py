"""Arithmetic whose bits do not depend on the batch: the result of a row is the same in any number of rows, at any position.

Libraries choose a matrix product's order of summation by the number of its rows, and vectorized functions compute the last elements of a
tensor by scalar code. The rules of :func:`batch_invariant` therefore fix the sizes that libraries see:

- a matrix product runs in tiles of :data:`TILE` rows, the last one padded;
- a transcendental function runs in pieces of :data:`_PIECE` elements, the last one padded to whole vectors.

Norms, softmax, sums over the last dimension and sums, differences, products and quotients of elements are computed row by row anyway.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal.utils.functional.product import openblas_mm

_aten = torch.ops.aten

TILE = 32
"""Rows of a tile. Tiles of contiguous rows of 16, 32 or 64 bits are aligned to :data:`_ALIGNMENT` if the first one is."""

_PIECE = 2**15
"""Elements of a piece: as many as torch computes in one thread, so that threads do not cut it at any other place."""

_VECTOR = 64
"""A multiple of the elements that a vectorized function computes at once: two vectors of 512 bits of bfloat16."""

_ALIGNMENT = 64
"""Bytes. Products of operands that are not aligned may be summed in another order."""


class _Active(threading.local):
    """Whether the mode is active in this thread."""

    value = False


_active = _Active()


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Context in which the bits of a row do not depend on the other rows of a batch. Does nothing inside of itself.

    It concerns the operations of this thread on a CPU, below autograd: the backward of a forward inside of the context may run outside of
    it, and then computes the same gradients up to rounding.

    Raises:
        RuntimeError: an operation inside is a product without a rule.
    """
    if _active.value:
        yield
        return
    _active.value = True
    try:
        with _BatchInvariant():
            yield
    finally:
        _active.value = False


class _BatchInvariant(TorchDispatchMode):
    """Replaces products and transcendental functions, and refuses products without a rule."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _rules().get(func)
        if rule is not None:
            return rule(*args, **kwargs)
        if func in _refused():
            raise RuntimeError(f"batch invariance: {func} has no rule, so that its bits depend on the batch")
        if _is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


# ---- products


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` ``[n, k]`` of ``[n, m]`` and ``[m, k]``, in tiles of rows."""
    return _in_tiles(lambda x, out: torch.mm(x, b_aligned, out=out), a, b_aligned := _aligned(b))


def addmm(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta * total + alpha * (a @ b)``, in tiles of rows. ``total`` is ``[k]``, ``[1, k]`` or ``[n, k]``."""
    b = _aligned(b)
    if total.dim() < 2 or total.shape[0] != a.shape[0]:
        row = _aligned(total)
        return _in_tiles(lambda x, out: torch.addmm(row, x, b, beta=beta, alpha=alpha, out=out), a, b)
    summands = iter(_whole_tiles(total).split(TILE))
    return _in_tiles(lambda x, out: torch.addmm(next(summands), x, b, beta=beta, alpha=alpha, out=out), a, b)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of ``[B, n, m]`` and ``[B, m, k]``, in tiles of rows. The size of the batch does not matter."""
    b = _aligned(b)
    rows = a.shape[1]
    if rows == TILE:
        return torch.bmm(_aligned(a), b)
    tiles = F.pad(a, (0, 0, 0, -rows % TILE)).split(TILE, dim=1)
    return torch.cat([torch.bmm(_aligned(x.contiguous()), b) for x in tiles], dim=1)[:, :rows].contiguous()


def _in_tiles(product: Callable[[Tensor, Tensor], Any], a: Tensor, b: Tensor) -> Tensor:
    """Return the products of the tiles of ``a`` ``[n, m]``, each written to its rows of the result."""
    tiles = _whole_tiles(a)
    out = tiles.new_empty(len(tiles), b.shape[1])
    for x, rows in zip(tiles.split(TILE), out.split(TILE), strict=True):
        product(x, rows)
    return out[: len(a)]


def _whole_tiles(x: Tensor) -> Tensor:
    """Return aligned rows ``[n, m]`` in memory of their own order, padded to whole tiles."""
    x = F.pad(x, (0, 0, 0, -len(x) % TILE)) if len(x) % TILE else x
    return _aligned(x.contiguous())


def _aligned(x: Tensor) -> Tensor:
    """Return the tensor at an aligned address, by a copy if necessary. Strides stay."""
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """Return what oneDNN's linear operation returns, computed by torch's own product."""
    rows = x.reshape(-1, x.shape[-1])
    out = mm(rows, weight.t()) if bias is None else addmm(bias, rows, weight.t())
    return out.view(*x.shape[:-1], len(weight))


# ---- transcendental functions


def _in_pieces(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``func(x, ...)`` of a function of elements, which runs in pieces of fixed size."""
    if not x.is_floating_point() or not x.numel():
        out: Tensor = func(x, *args, **kwargs)
        return out
    flat = x.reshape(-1)
    flat = F.pad(flat, (0, -flat.numel() % _VECTOR))
    pieces = [func(piece, *args, **kwargs) for piece in flat.split(_PIECE)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[: x.numel()].view(x.shape)


# ---- which rule an operation has


def _of_pieces(func: Any) -> Callable[..., Tensor]:
    """Return the rule of a function of elements."""
    return lambda x, *args, **kwargs: _in_pieces(func, x, *args, **kwargs)


def _into(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the form of a rule that writes to ``out``."""
    return lambda *args, out, **kwargs: out.copy_(rule(*args, **kwargs))


def _in_place(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the form of a rule that overwrites its first argument."""
    return lambda x, *args, **kwargs: x.copy_(rule(x, *args, **kwargs))


_FUNCTIONS = ("silu", "gelu", "sigmoid", "softplus", "exp", "tanh", "log", "cos", "sin", "rsqrt", "erf")
"""Functions of one tensor whose vectorized and scalar forms may differ."""

_UNKNOWN_PRODUCTS = (
    *("addbmm", "addmv", "addr", "baddbmm", "convolution", "dot", "mv", "vdot", "_grouped_mm", "_addmm_activation"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "_scaled_mm"),
)
"""Products without a rule."""


@functools.cache
def _rules() -> dict[Any, Callable[..., Any]]:
    """Return the rules by operation."""
    rules: dict[Any, Callable[..., Any]] = {
        _aten.mm.default: mm,
        _aten.mm.out: _into(mm),
        _aten.addmm.default: addmm,
        _aten.addmm.out: _into(addmm),
        _aten.addmm_.default: _in_place(addmm),
        _aten.bmm.default: bmm,
        _aten.bmm.out: _into(bmm),
        openblas_mm.default: mm,
        openblas_mm.out: _into(mm),
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        rules[torch.ops.mkldnn._linear_pointwise.default] = _onednn_linear
    for name in _FUNCTIONS:
        rules[getattr(_aten, name).default] = _of_pieces(getattr(_aten, name).default)
        inplace = getattr(_aten, f"{name}_", None)
        if inplace is not None:
            rules[inplace.default] = _in_place(_of_pieces(getattr(_aten, name).default))
    return rules


@functools.cache
def _refused() -> frozenset[Any]:
    """Return the operations without a rule that are refused."""
    packets = [getattr(_aten, name) for name in _UNKNOWN_PRODUCTS if hasattr(_aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return whether an operation is composed of others that the mode must see, which autograd has not taken apart."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))
