"""Transport that sends an engine's weights to inference servers over a process group."""

from __future__ import annotations

from functools import partial

import torch

from areal.api.control import Control
from areal.inference.http.group.carrier import Carrier
from areal.inference.http.group.chunk import CHUNK_BYTES, ChunkMemory, cut_chunks
from areal.inference.http.group.sender import INTERRUPTED_NOTE, GroupSender, Members
from areal.inference.http.servers.group_routes import GroupRoutes
from areal.weight_sync.transport import OutgoingTensors, TensorTransport


class ProcessGroupTransport(TensorTransport):
    """Broadcasts from the rank that owns the servers. The next chunk is gathered while the current one is sent.

    A server that dies, hangs or refuses a tensor raises an error with its name on every rank, within ``timeout`` seconds. The update has
    then reached no server: all that had started it have lost their weights. They are refused until a later update has succeeded, which
    ``HTTPRollout.sync`` tries at once, without a server that died.

    Args:
        control: control plane over all ranks of the trainer.
        servers: the servers, on the rank that owns them; ``None`` on all others.
        routes: requests of the servers' kind.
        carrier: carrier of the tensors; used on the owner's rank only.
        packed_bytes: size of the buffers into which tensors are packed; ``None`` to send them one by one.
        chunk_bytes: maximum size of the tensors that one request announces, unless a single one is larger. The owner's rank allocates
            two buffers of this size on the carrier's device.
        cast: dtype in which floating-point tensors are sent.
        timeout: seconds for each request, and for all workers to join or to receive a chunk. Other ranks wait in a collective meanwhile,
            so it must be below their timeout.

    Raises:
        ValueError: a size or the time limit is not positive.
    """

    unsent_note = INTERRUPTED_NOTE

    def __init__(
        self,
        control: Control,
        servers: Members | None,
        routes: GroupRoutes,
        carrier: Carrier,
        *,
        packed_bytes: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        cast: torch.dtype | None = None,
        timeout: float = 60.0,
    ) -> None:
        for name, value in {"packed_bytes": packed_bytes, "chunk_bytes": chunk_bytes, "timeout": timeout}.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value}: it must be above 0")
        sender = None
        if servers is not None:
            memory = ChunkMemory(chunk_bytes, carrier.device)
            sender = BroadcastSender(servers, routes, carrier, memory, packed_bytes=packed_bytes, timeout=timeout)
        super().__init__(control, sender, cast=cast)


class BroadcastSender(GroupSender):
    """Implements :class:`~areal.weight_sync.transport.TensorSender`: a round is a chunk, which is announced on all servers and broadcast.

    Args:
        servers, routes, packed_bytes, timeout: as in :class:`~areal.inference.http.group.sender.GroupSender`.
        carrier: carrier of the tensors.
        memory: buffers of the chunks, on the carrier's device.
    """

    def __init__(
        self,
        servers: Members,
        routes: GroupRoutes,
        carrier: Carrier,
        memory: ChunkMemory,
        *,
        packed_bytes: int | None,
        timeout: float,
    ) -> None:
        super().__init__(servers, routes, carrier, packed_bytes=packed_bytes, timeout=timeout)
        self._broadcasts, self._memory = carrier, memory

    def transfer(self, tensors: OutgoingTensors) -> None:
        for chunk in cut_chunks(tensors, self._memory, self._packed_bytes):
            # The next chunk is gathered while this one is on its way.
            send = partial(self._broadcasts.broadcast, chunk.buffers, self._timeout)
            self.start_round(f"{chunk.names} did not reach every server", self._routes.update(chunk.specs), send)
        self.end_round()
