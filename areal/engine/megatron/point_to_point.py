"""Communication between pipeline stages, within the engine's process groups."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor


def _start(
    *,
    tensor_send_prev: Tensor | None,
    tensor_recv_prev: Tensor | None,
    tensor_send_next: Tensor | None,
    tensor_recv_next: Tensor | None,
    group: dist.ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    """Start sends and receives, in place of Megatron's function of the same arguments. Ranks are global."""
    starts = {
        "send_next": (dist.isend, tensor_send_next, next_pipeline_rank),
        "recv_prev": (dist.irecv, tensor_recv_prev, prev_pipeline_rank),
        "send_prev": (dist.isend, tensor_send_prev, prev_pipeline_rank),
        "recv_next": (dist.irecv, tensor_recv_next, next_pipeline_rank),
    }
    # Neighbours begin with opposite operations, because a GPU runs them one after the other.
    even = ("send_next", "recv_prev", "send_prev", "recv_next")
    odd = ("recv_prev", "send_next", "recv_next", "send_prev")
    works: dict[str, Any] = {}
    for name in odd if group.rank() % 2 else even:
        start, tensor, peer = starts[name]
        if tensor is not None:
            works[name] = start(tensor, peer, group=group)
    return works


class StageCommunicator(P2PCommunicator):
    """Megatron's communicator, restricted to the group of the pipeline's stages.

    Between two interleaved stages, Megatron sends in one direction over the default process group. An engine that ends by a fault aborts its
    own groups only, so that a rank would wait there for a peer that has failed.
    """

    # The same code, with another function under the name that it calls.
    _communicate = FunctionType(
        P2PCommunicator._communicate.__code__,
        vars(p2p_communication) | {"_p2p_ops": _start},
        argdefs=P2PCommunicator._communicate.__defaults__,
    )
    _communicate.__kwdefaults__ = P2PCommunicator._communicate.__kwdefaults__
