"""Bytes of a rank in an update of inference servers by shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.engine.checkpoint.tensor_blocks import block_bytes, block_numbers


@dataclass(frozen=True)
class ServerUpdate:
    """Bytes of the busiest rank with :class:`~areal.inference.http.group.ReshardCarrier`.

    Attributes:
        blocks: number of ranks that send to one server.
        sent: bytes that a rank sends to servers.
        exchanged: bytes that it receives from other ranks before, at most.
    """

    blocks: int
    sent: int
    exchanged: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], itemsize: int, ranks: int, servers: int) -> ServerUpdate:
        """Return the update in which a rank sends and receives the fewest bytes.

        Args:
            shapes: shapes of the model's tensors.
            itemsize: bytes of an element.
            ranks: number of ranks of the trainer.
            servers: number of servers.
        """
        tensors = [(shape, itemsize) for shape in shapes]
        updates = []
        for blocks in block_numbers(ranks):
            # Ranks with the same block divide the servers among them.
            block, of_rank = block_bytes(tensors, blocks), -(-servers // (ranks // blocks))
            updates.append(cls(blocks, of_rank * block, block if ranks > 1 else 0))
        return min(updates, key=lambda each: (each.sent + each.exchanged, each.exchanged))
