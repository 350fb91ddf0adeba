"""Float32 matrix products of a CPU by a library that is faster than MKL, which ``torch.mm`` calls, on other processors than Intel's.

- oneDNN, a part of torch, uses 512-bit instructions where MKL does not: such products take half of the time.
- OpenBLAS, a part of numpy's wheels, has kernels for AMD's processors with AVX2. One thread is 5 to 15 % faster than MKL.

``torch.backends.mkldnn.flags(enabled=False)`` turns both off.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from areal.utils.platform import openblas_threads

_CPUINFO = Path("/proc/cpuinfo")

_PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that are ordinary memory: no fake and no distributed tensors."""


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
        # numpy's OpenBLAS has threads of its own. From 0.4 ms on, the call from Python takes less than is gained.
        return torch.get_num_threads() == 1 and rows * columns >= 2**18 and rows * inner * columns >= 2**24

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """See :meth:`Library.product`."""
        a, b = _for_blas(a), _for_blas(b)
        out: Tensor = openblas_mm(a, b) if into is None else openblas_mm(a, b, out=into)
        return out if bias is None else out.add_(bias)

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
