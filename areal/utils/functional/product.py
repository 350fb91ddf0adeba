"""Matrix products: in float32 by the faster of a CPU's libraries, and of 16-bit operands without rounding the result.

``torch.mm`` of float32 matrices calls MKL, which other libraries exceed on other processors than Intel's:

- oneDNN, a part of torch, uses 512-bit instructions where MKL does not: such products take half of the time.
- OpenBLAS, a part of numpy's wheels, has kernels for AMD's processors with AVX2. One thread is 5 to 15 % faster than MKL.

``torch.backends.mkldnn.flags(enabled=False)`` turns both off.

``torch.mm(a, b)`` of bfloat16 operands is summed in float32 and then rounded to bfloat16. A logit of size 20 loses up to 0.06.
CUDA has products with another dtype of the result (``out_dtype``). Other devices do not: there the operands are converted.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from areal.utils.platform import openblas_threads

_OUT_DTYPE_DEVICES = frozenset({"cuda"})
"""Devices with a kernel for ``torch.mm(out_dtype=...)``. A CPU raises NotImplementedError (torch 2.13)."""

_NARROW = (torch.float16, torch.bfloat16)

_CPUINFO = Path("/proc/cpuinfo")

_PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that are ordinary memory: no fake and no distributed tensors."""


def operand_dtype(compute: torch.dtype, out: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that operands of ``compute`` are multiplied in, if the result is to have the dtype ``out``.

    Narrower than ``out`` only where the device has a kernel that does not round the result.
    """
    native = device.type in _OUT_DTYPE_DEVICES and compute in _NARROW and out == torch.float32
    return compute if native else torch.promote_types(compute, out)


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear``. Differentiable once where a faster library computes it.

    Args:
        x: ``[..., m]``.
        weight: ``[k, m]``.
        bias: ``[k]``.
    """
    if torch.compiler.is_compiling() or faster_library(x, weight) is None:
        return F.linear(x, weight, bias)
    # Rows outside of the function: a model may change the result in place, which autograd forbids for a view made inside.
    out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], len(weight))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of ``[n, m]`` and ``[m, k]``, in their dtype. Not differentiable."""
    library = faster_library(a, b)
    return torch.mm(a, b) if library is None else library.product(a, b)


def product(
    a: Tensor,
    b: Tensor,
    out: torch.dtype = torch.float32,
    *,
    into: Tensor | None = None,
    spare: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return ``scale * (a @ b + bias)`` in the dtype ``out``, without rounding to a narrower dtype. Not differentiable.

    Args:
        a, b: ``[n, m]`` and ``[m, k]``, of floating dtypes that are not wider than ``out``.
        out: dtype of the sums and of the result.
        into: ``[n, k]`` of the dtype ``out``. Buffer that gets the result.
        spare: the same. Buffer that the result may be written to, where that is no additional copy.
        bias: ``[k]``.
        scale: factor of the result.

    Raises:
        ValueError: a dtype does not fit.
    """
    _check(a, b, out, spare if into is None else into)
    a, b, options = _operands(a, b, out)
    library = faster_library(a, b)
    if into is None and (library is None or library.writes):
        into = spare
    if library is not None:
        a, bias = (a, bias) if scale == 1.0 else (a * scale, None if bias is None else bias * scale)
        return library.product(a, b, None if bias is None else bias.to(out), into)
    into = a.new_empty(a.shape[0], b.shape[1], dtype=out) if into is None else into
    if bias is not None:
        # A bias of the operands' dtype would be widened by the kernel: the same numbers.
        return torch.addmm(bias.to(out), a, b, beta=scale, alpha=scale, out=into, **options)
    if scale != 1.0:
        return torch.addmm(into, a, b, beta=0.0, alpha=scale, out=into, **options)  # what `into` had is ignored
    return torch.mm(a, b, out=into, **options)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute ``total += a @ b`` in place, in the dtype of the total. The product is not rounded before it is added.

    Args:
        total: ``[n, k]``.
        a, b: ``[n, m]`` and ``[m, k]``, of floating dtypes that are not wider than that of the total.

    Raises:
        ValueError: a dtype does not fit.
    """
    _check(a, b, total.dtype, total)
    a, b, options = _operands(a, b, total.dtype)
    if not options:
        library = faster_library(a, b)
        return total.addmm_(a, b) if library is None else library.add(total, a, b)
    if _adds_to_wider(total.device):
        return torch.addmm(total, a, b, out=total, **options)
    return total.add_(torch.mm(a, b, **options))


class WideLinear(torch.autograd.Function):
    """``x @ weight.T + bias`` in the dtype ``out``, without rounding. Differentiable once.

    ``(x, weight, bias, out, grad_dtype) -> [n, k]`` for ``x`` ``[n, m]``, ``weight`` ``[k, m]`` and ``bias`` ``[k]`` or
    ``None``. The gradient of the result is converted to ``grad_dtype`` before it is multiplied.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: torch.dtype,
        grad_dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grad_dtype, ctx.bias_dtype = grad_dtype, None if bias is None else bias.dtype  # type: ignore[attr-defined]
        return product(x, weight.t(), out, bias=bias)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        narrow, out = grad.to(ctx.grad_dtype), grad.dtype  # type: ignore[attr-defined]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        return (
            product(narrow, weight, out).to(x.dtype) if needs_x else None,
            product(narrow.t(), x, out).to(weight.dtype) if needs_weight else None,
            grad.sum(0).to(ctx.bias_dtype) if needs_bias else None,  # type: ignore[attr-defined]
            None,
            None,
        )


class _Linear(torch.autograd.Function):
    """:func:`linear_product` of rows ``[n, m]`` by the faster library."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # A frozen weight does not need its input.
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return product(x, weight.t(), x.dtype, bias=bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return (
            None if weight is None else matmul(grads[0], weight),
            None if x is None else matmul(grads[0].t(), x),
            grads[0].sum(0) if ctx.needs_input_grad[2] else None,
        )


def _operands(a: Tensor, b: Tensor, out: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the operands of a kernel, and its ``out_dtype`` if it needs one."""
    dtype = operand_dtype(torch.promote_types(a.dtype, b.dtype), out, a.device)
    return a.to(dtype), b.to(dtype), ({} if dtype == out else {"out_dtype": out})


def _check(a: Tensor, b: Tensor, out: torch.dtype, into: Tensor | None) -> None:
    if torch.promote_types(torch.promote_types(a.dtype, b.dtype), out) != out:
        raise ValueError(f"operands are {a.dtype} and {b.dtype}, and the result {out}: pass a result at least as wide")
    if into is not None and into.dtype != out:
        raise ValueError(f"the buffer is {into.dtype}, and the result {out}: pass a buffer of the result's dtype")


@functools.cache
def _adds_to_wider(device: torch.device) -> bool:
    """Return whether ``torch.addmm`` adds a product of 16-bit operands to a float32 matrix; earlier versions of torch raise."""
    half = torch.zeros(8, 8, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(half.float(), half, half, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


# ---- float32 products of a CPU by other libraries than MKL


class Library(Protocol):
    """Products of float32 matrices on a CPU. None of them is differentiable."""

    writes: bool
    """Whether the result can be written to given memory without a copy."""

    def suits(self, rows: int, inner: int, columns: int) -> bool:
        """Return whether a product of ``[rows, inner]`` and ``[inner, columns]`` is faster than by ``torch.mm``."""

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Return ``a @ b + bias``, written to ``into`` if given.

        Args:
            a, b: ``[n, m]`` and ``[m, k]``, of any strides.
            bias: ``[k]``.
            into: ``[n, k]``.
        """

    def add(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute ``total += a @ b`` in place."""


class OneDNN:
    """oneDNN, in torch."""

    writes = False

    def suits(self, rows: int, inner: int, columns: int) -> bool:
        """See :meth:`Library.suits`."""
        return rows * inner * columns > 0

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """See :meth:`Library.product`."""
        # The operation copies a first operand that is not contiguous. A second one may be transposed, but not overlap with itself.
        b = b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
        return out if into is None else into.copy_(out)

    def add(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See :meth:`Library.add`."""
        return total.add_(self.product(a, b))


class OpenBLAS:
    """OpenBLAS, by numpy."""

    writes = True

    def suits(self, rows: int, inner: int, columns: int) -> bool:
        """See :meth:`Library.suits`."""
        # numpy's OpenBLAS does not use torch's threads. From 0.4 ms on, the call from Python takes less than is gained.
        return torch.get_num_threads() == 1 and rows * columns >= 2**18 and rows * inner * columns >= 2**24

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """See :meth:`Library.product`."""
        a, b = _for_blas(a), _for_blas(b)
        out: Tensor = openblas_mm(a, b) if into is None else openblas_mm(a, b, out=into)
        if bias is None:
            return out
        # Selective checkpointing keeps a new result, which must not change.
        return out + bias if into is None else out.add_(bias)

    def add(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See :meth:`Library.add`."""
        return total.addmm_(a, b)  # numpy cannot add to its result, and a pass over the total takes more than is gained


def faster_library(a: Tensor, b: Tensor) -> Library | None:
    """Return the library that computes the product of ``a`` ``[..., m]`` and ``b`` ``[m, k]`` or ``[k, m]`` faster than torch."""
    plain = type(a) in _PLAIN and type(b) in _PLAIN and a.dtype == b.dtype == torch.float32 and a.device == b.device
    if not plain or a.device.type != "cpu":
        return None
    library = _library_of_processor()
    if library is None or not torch.backends.mkldnn.enabled or torch.is_autocast_enabled("cpu"):
        return None
    inner = max(a.shape[-1], 1)
    return library if library.suits(a.numel() // inner, a.shape[-1], b.numel() // inner) else None


@functools.cache
def _library_of_processor() -> Library | None:
    """Return the library that is faster than MKL on this processor."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else "GenuineIntel"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and "GenuineIntel" not in text and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return OneDNN()
    if capability == "AVX2" and "AuthenticAMD" in text and _numpy_has_openblas() and openblas_threads() == 1:
        return OpenBLAS()
    return None


# ---- OpenBLAS as an operation of torch, which dispatch modes see


_operations = torch.library.Library("areal", "FRAGMENT")
_operations.define("openblas_mm(Tensor a, Tensor b) -> Tensor")
_operations.define("openblas_mm.out(Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)")

openblas_mm = torch.ops.areal.openblas_mm
"""Product of float32 ``[n, m]`` and ``[m, k]``, in each of which rows or columns are contiguous. Overloads ``default`` and ``out``."""


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _mm_out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    # Tensor.numpy() would forbid that FSDP frees the memory of a weight later.
    np.matmul(np.from_dlpack(a.detach()), np.from_dlpack(b.detach()), out=np.from_dlpack(out.detach()))
    return out


_operations.impl("openblas_mm", _mm, "CPU")
_operations.impl("openblas_mm.out", _mm_out, "CPU")
_operations.impl("openblas_mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")
_operations.impl("openblas_mm.out", lambda a, b, *, out: out, "Meta")


@register_flop_formula(openblas_mm)
def _flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    return 2 * a.numel() * b[-1]


def _for_blas(x: Tensor) -> Tensor:
    """Return a matrix in which the elements of each row, or of each column, are neighbours, by a copy if necessary."""
    (rows, columns), (down, right) = x.shape, x.stride()
    by_rows, by_columns = right == 1 and down >= columns, down == 1 and right >= rows
    return x if by_rows or by_columns else x.contiguous()


def _numpy_has_openblas() -> bool:
    """Return whether numpy was built with OpenBLAS, and can write to tensors: before version 2.1 it only reads them."""
    built = np.show_config(mode="dicts")
    has_openblas = built is not None and "openblas" in built["Build Dependencies"]["blas"]["name"]
    return has_openblas and np.from_dlpack(torch.empty(1)).flags.writeable
