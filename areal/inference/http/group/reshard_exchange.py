"""Assembly of the block of a tensor that a rank sends, from its own parts and those of other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.weights import LocalTensor
from areal.inference.http.group.boxes import within
from areal.inference.http.group.reshard_plan import Piece, PlannedTensor
from areal.weight_sync.chain import box_numbers


def assemble_block(own: Sequence[LocalTensor], tensor: PlannedTensor, rank: int, device: torch.device) -> Tensor | None:
    """Return the block of a tensor that a rank sends; ``None`` if it sends none. Collective among ranks that exchange parts of it.

    Args:
        own: parts that this rank has.
        tensor: the tensor.
        rank: this rank.
        device: device of the block.
    """
    exchange = tensor.exchange
    parts = {box_numbers(each.box): each.tensor.detach() for each in own}

    def values(piece: Piece) -> Tensor:
        return parts[piece.part][within(piece.box, piece.part)].to(device, tensor.dtype).contiguous()

    operations = [dist.P2POp(dist.isend, values(piece), piece.target) for piece in exchange.sent.get(rank, ())]
    copies: list[tuple[Tensor, Tensor]] = []
    pieces, block = exchange.pieces.get(rank, ()), None
    if [piece.source for piece in pieces] == [rank]:
        # The block is sent as it lies.
        block = values(pieces[0])
    elif pieces:
        box = exchange.blocks[rank]
        block = torch.empty([len(range(*numbers)) for numbers in box], dtype=tensor.dtype, device=device)
        for piece in pieces:
            place = block[within(piece.box, box)]
            if piece.source == rank:
                place.copy_(values(piece))
                continue
            received = place
            if not place.is_contiguous():
                received = torch.empty_like(place, memory_format=torch.contiguous_format)
                copies.append((place, received))
            operations.append(dist.P2POp(dist.irecv, received, piece.source))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for place, received in copies:
        place.copy_(received)
    return block
