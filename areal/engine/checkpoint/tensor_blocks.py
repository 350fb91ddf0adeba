"""Equal blocks of tensors, each of which another trainer rank sends to an inference server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

MOST_SHARDS = 16
"""Maximum number of shards that NCCL's resharding joins into one full tensor (``MAX_SOURCES`` in its sources, as vLLM checks)."""


def block_numbers(ranks: int, most: int = MOST_SHARDS) -> list[int]:
    """Return the numbers of blocks, up to a maximum, that ranks may send."""
    return [number for number in range(1, min(ranks, most) + 1) if ranks % number == 0 or number & (number - 1) == 0]


def block_bytes(tensors: Iterable[tuple[Sequence[int], int]], blocks: int) -> int:
    """Return the bytes of a block of all tensors, given by shape and bytes of an element. One that is not divided evenly is a block."""
    return sum(
        prod(shape) * itemsize // (blocks if any(length % blocks == 0 for length in shape) else 1)
        for shape, itemsize in tensors
    )
