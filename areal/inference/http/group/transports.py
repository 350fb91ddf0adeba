"""The transport of each carrier."""

from __future__ import annotations

import torch

from areal.api.control import Control
from areal.inference.http.group.carrier import Carrier
from areal.inference.http.group.chunk import CHUNK_BYTES
from areal.inference.http.group.ipc import IPCCarrier, IPCTransport
from areal.inference.http.group.process_group_transport import ProcessGroupTransport
from areal.inference.http.group.reshard_carrier import ReshardCarrier
from areal.inference.http.group.reshard_transport import ReshardTransport
from areal.inference.http.group.sender import Members
from areal.inference.http.servers.group_routes import GroupRoutes, ShardRoutes, TakesHandles
from areal.weight_sync.transport import Transport

AnyCarrier = Carrier | IPCCarrier | ReshardCarrier


def transport_by(
    carrier: AnyCarrier,
    control: Control,
    servers: Members | None,
    routes: GroupRoutes,
    *,
    packed_bytes: int | None,
    chunk_bytes: int = CHUNK_BYTES,
    cast: torch.dtype | None,
    timeout: float,
) -> Transport:
    """Return the transport of a carrier. Arguments as of :class:`ProcessGroupTransport`.

    Raises:
        ValueError: servers of this kind do not receive in this way.
    """
    if isinstance(carrier, IPCCarrier):
        if not isinstance(routes, TakesHandles):
            raise ValueError(f"carrier = {carrier!r}: servers of this kind take no handles of memory: pass another")
        return IPCTransport(control, servers, routes, carrier, cast=cast, timeout=timeout)
    if isinstance(carrier, ReshardCarrier):
        if not isinstance(routes, ShardRoutes):
            raise ValueError(f"carrier = {carrier!r}: servers of this kind take no shards: pass another")
        return ReshardTransport(control, servers, routes, carrier, cast=cast, timeout=timeout)
    return ProcessGroupTransport(
        control,
        servers,
        routes,
        carrier,
        packed_bytes=packed_bytes,
        chunk_bytes=chunk_bytes,
        cast=cast,
        timeout=timeout,
    )
