"""Memory of residuals that are no longer needed, which the residuals of the next micro-batch are written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

_MOST_BYTES = 2**30
"""Memory that is kept between micro-batches at most."""


class SpareResiduals:
    """The residuals of the last micro-batch.

    On a CPU, new memory is mapped at its first use, by a page fault for each 4 KiB, which takes longer than to write it. Allocators of
    accelerators reuse memory themselves.

    Args:
        applies: keep them. Not over several devices, where a program chooses the placement of its residuals.
    """

    def __init__(self, *, applies: bool) -> None:
        self._applies = applies
        self._arrays: Sequence[Array] = ()

    def take(self, shapes: Callable[[], Sequence[Any]]) -> Sequence[Array]:
        """Return arrays of the given shapes and dtypes, to be donated to a program; none where memory is not reused."""
        if not self._applies:
            return ()
        wanted, (arrays, self._arrays) = shapes(), (self._arrays, ())
        if not _fits(wanted):
            return ()
        if [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in wanted]:
            return arrays
        del arrays  # before there are others
        # Copied, because only memory of JAX's own can be donated.
        return [jax.device_put(np.empty(x.shape, x.dtype), may_alias=False) for x in wanted]

    def give(self, arrays: Sequence[Array]) -> None:
        """Keep the arrays of a program that has ended, up to a bound."""
        if self._applies and _fits(arrays):
            self._arrays = arrays

    def clear(self) -> None:
        """Free the memory."""
        self._arrays = ()


def _fits(arrays: Sequence[Any]) -> bool:
    """Return whether arrays, or their shapes and dtypes, are within the bound."""
    return sum(x.size * x.dtype.itemsize for x in arrays) <= _MOST_BYTES
