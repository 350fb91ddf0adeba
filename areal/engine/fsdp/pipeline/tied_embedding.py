"""Tied embeddings in a pipeline: the first stage uses the embedding, and the last stage a copy of it as output head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal.engine.torch.model_chunks import ModelChunks
from areal.utils.dtensor import collective_device, empty_like, local_part


class TiedGradients:
    """Sums the gradients of a tied weight over both stages.

    With equal gradients, both copies take equal optimizer steps.

    Args:
        chunks: sharded model with resharded parameters.
    """

    def __init__(self, chunks: ModelChunks) -> None:
        self._copies = [parameter for parameter in chunks.copies() if parameter.requires_grad]
        self._group = chunks.group
        # Only the ranks of the first and the last stage have the weight.
        ends = (chunks.split.ranks[0], chunks.split.ranks[-1])
        tied = chunks.full_model.hf.get_output_embeddings().weight is chunks.full_model.hf.get_input_embeddings().weight
        self._tied: list[nn.Parameter] = []
        self._peer: int | None = None
        self._summed = False
        if not tied or chunks.group is None or chunks.rank not in ends:
            return
        if chunks.rank == ends[0]:
            self._tied.append(chunks[0].hf.get_input_embeddings().weight)  # type: ignore[union-attr, operator, arg-type]
        if chunks.rank == ends[1]:
            self._tied.append(chunks[len(chunks) - 1].hf.get_output_embeddings().weight)  # type: ignore[union-attr, operator, arg-type]
        # With adapters the weight is not trained.
        self._tied = [parameter for parameter in self._tied if parameter.requires_grad]
        # Some schedules have both stages on one rank: no communication then.
        if ends[0] != ends[1]:
            self._peer = ends[1] if chunks.rank == ends[0] else ends[0]

    def before_backward(self) -> None:
        """Prepare for further accumulation: keep the summed gradient on the first stage only.

        Otherwise the next sum would count it twice.
        """
        if self._tied and self._summed:
            for parameter in self._copies:
                if parameter.grad is not None:
                    local_part(parameter.grad).zero_()
            self._summed = False

    @torch.no_grad()
    def sum(self) -> None:
        """Set both gradients to their sum, bit for bit equal. Collective over the first and the last stage."""
        if not self._tied:
            return
        grads = [_local_gradient(parameter) for parameter in self._tied]
        # Both copies are on this rank.
        if self._peer is None:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        else:
            # With CPU offload, shards are sent from a copy on the device.
            sent = grads[0].to(collective_device(self._tied[0]), copy=True)
            other = torch.empty_like(sent)
            ops = [
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=self._peer),
                dist.P2POp(dist.irecv, other, group=self._group, group_peer=self._peer),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            # Addition of two numbers is commutative: both stages get the same bits.
            grads[0].add_(other.to(grads[0].device))
        self._summed = True


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the local gradient of a parameter, created as zeros if missing."""
    if parameter.grad is None:
        parameter.grad = empty_like(parameter)
        local_part(parameter.grad).zero_()
    local: Tensor = local_part(parameter.grad)
    return local
