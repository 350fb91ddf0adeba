"""One asynchronous copy of many host tensors to a device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from areal.utils import platform

_ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes, so that kernels can load it in large units."""


class HostCopy:
    """Copies host tensors to a device together: :meth:`add` each, then :meth:`run`, then :meth:`get` each.

    A copy of a tensor in pageable memory makes the host wait for everything that the device has to do before. So the tensors
    are packed in one buffer of pinned memory, and the host waits for nothing.

    Args:
        device: destination. On a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._added: dict[int, Tensor] = {}
        self._copied: dict[int, Tensor] = {}

    def add(self, x: Tensor) -> Tensor:
        """Add a tensor, once if it is added repeatedly. Returns it."""
        self._added[id(x)] = x
        return x

    def run(self) -> None:
        """Copy what was added. The tensors may be changed afterwards."""
        # Tensors that are on a device already, or in a graph, are left to get().
        packed = [x for x in self._added.values() if x.device.type == "cpu" and not x.requires_grad]
        if self._device.type == "cpu" or not packed:
            return
        starts, end = [], 0
        for x in packed:
            starts.append(end)
            end += math.ceil(x.nbytes / _ALIGNMENT) * _ALIGNMENT
        # A new buffer for each copy: torch does not use pinned memory again before the copies from it are complete.
        buffer = platform.host_buffer(end, self._device)
        for x, start in zip(packed, starts, strict=True):
            _view(buffer, start, x).copy_(x)
        on_device = buffer.to(self._device, non_blocking=True)
        self._copied = {id(x): _view(on_device, start, x) for x, start in zip(packed, starts, strict=True)}

    def get(self, x: Tensor) -> Tensor:
        """Return a tensor that was added, on the device: a view of the buffer there."""
        copied = self._copied.get(id(x))
        return x.to(self._device, non_blocking=True) if copied is None else copied


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes from ``start`` on with the dtype and the shape of ``like``."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


TensorMap = Callable[[Tensor], Tensor]
"""A function that is applied to each tensor of a structure."""
