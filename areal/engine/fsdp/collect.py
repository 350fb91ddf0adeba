"""Puts the tensors of files together from the shards of all ranks, each on the one rank that writes it."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.engine.fsdp.naming import Box, DiskTensor
from areal.engine.fsdp.shards import local_shard
from areal.utils.distributed import ControlPlane


class PieceCollector:
    """Sends shards to the ranks that write them, over the control plane: unlike a gather over the groups of the model, a rank that dies
    lets nobody wait. Collective.

    Args:
        tensors: the same on every rank, sharded in any way; they must not change meanwhile.
    """

    def __init__(self, tensors: list[Tensor], control: ControlPlane) -> None:
        self._shards = [local_shard(tensor)[0] for tensor in tensors]
        self._control = control
        boxes = control.gather([[(s.start, s.stop) for s in local_shard(tensor)[1]] for tensor in tensors])
        self._boxes: list[list[Box]] = [[tuple(slice(*bounds) for bounds in box) for box in mine] for mine in boxes]

    def collect(self, index: int, piece: DiskTensor, writer: int) -> Tensor | None:
        """A tensor of a file. Every rank calls it, in the same order.

        Args:
            index: the tensor among ``tensors`` that ``piece`` is a box of.
            writer: the rank that needs it.

        Returns:
            On ``writer`` the tensor, in host memory of its own; elsewhere ``None``.

        Raises:
            RankLostError: a rank died; names it.
        """
        me = self._control.rank
        if me != writer:
            parts = self._parts(index, piece, writer)
            mine = [self._shards[index][in_box] for rank, (_, in_box) in parts.items() if rank == me]
            self._control.exchange([(_bytes(part.cpu().contiguous()), writer) for part in mine], [])
            return None
        shard = self._shards[index]
        out = torch.empty(piece.shape, dtype=shard.dtype)
        arriving: list[tuple[Tensor, Tensor, int]] = []
        for rank, (on_disk, in_box) in self._parts(index, piece, writer).items():
            if rank == me:
                out[on_disk].copy_(shard[in_box].view(out[on_disk].shape))
            else:
                arriving.append((out[on_disk], torch.empty(out[on_disk].shape, dtype=out.dtype), rank))
        self._control.exchange([], [(_bytes(buffer), rank) for _, buffer, rank in arriving])
        for target, buffer, _ in arriving:
            target.copy_(buffer)
        return out

    def _parts(self, index: int, piece: DiskTensor, writer: int) -> dict[int, tuple[Box, Box]]:
        """Which ranks give which part of a piece: of several with the same shard the writer, or else the first."""
        found: dict[str, tuple[int, tuple[Box, Box]]] = {}
        ranks = range(self._control.size)
        for rank in sorted(ranks, key=lambda rank: rank != writer):
            box = self._boxes[rank][index]
            shared = piece.overlap(box) if box else ((), ())
            if shared is not None:
                found.setdefault(repr(box), (rank, shared))
        return dict(found.values())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
