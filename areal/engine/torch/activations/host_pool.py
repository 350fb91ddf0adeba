"""Host memory for activations, in blocks that are used again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from areal.utils import platform
from areal.utils.data.padding import round_up

BLOCK_BYTES = 8 * 2**20
"""Size of a block: a power of two, because torch rounds pinned allocations up to one. A layer leaves less than a block unused."""

_ALIGNMENT = 512
"""A copy begins at a multiple of this many bytes in its block."""


class HostPool:
    """Blocks of host memory for copies from and to a device. They are allocated when none is free, and kept.

    Args:
        device: device of the copies. For a GPU, blocks are pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, sizes: Sequence[int]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Take the blocks for copies of these sizes, in bytes, end to end.

        Returns:
            The blocks, and for each size the uint8 tensors that together have so many bytes.
        """
        starts = list(accumulate((round_up(size, _ALIGNMENT) for size in sizes), initial=0))
        number = -(-starts[-1] // BLOCK_BYTES)
        missing = number - len(self._free)
        self._free += [self._allocate() for _ in range(missing)]
        blocks, self._free = self._free[:number], self._free[number:]
        return blocks, [_pieces(blocks, start, start + size) for start, size in zip(starts, sizes, strict=False)]

    def give_back(self, blocks: Sequence[Tensor]) -> None:
        """Return blocks for later copies. Copies from them must be enqueued before."""
        self._free += blocks

    def _allocate(self) -> Tensor:
        # In a plan nothing is copied: one byte is as good as a block.
        if self._device.type == "meta":
            return torch.empty(1, dtype=torch.uint8).expand(BLOCK_BYTES)
        return platform.host_buffer(BLOCK_BYTES, self._device)


def _pieces(blocks: Sequence[Tensor], start: int, end: int) -> list[Tensor]:
    """Return the bytes from ``start`` to ``end`` of blocks end to end."""
    numbers = range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
    return [blocks[i][max(start - i * BLOCK_BYTES, 0) : end - i * BLOCK_BYTES] for i in numbers]
