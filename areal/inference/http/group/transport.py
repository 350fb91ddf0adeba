"""Transports that send an engine's weights to inference servers over a process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal.api.control import Control
from areal.inference.http.group.carrier import Carrier
from areal.inference.http.group.chunk import CHUNK_BYTES, PACKED_BYTES
from areal.inference.http.group.sender import GroupSender
from areal.inference.http.group.servers import Servers
from areal.inference.http.group.standalone import StandaloneServers
from areal.inference.http.servers.call import HTTPCall
from areal.inference.http.servers.group_routes import GroupRoutes
from areal.inference.http.servers.schemas import Anything, Empty
from areal.inference.http.servers.sglang_group import SGLangGroupRoutes
from areal.inference.http.servers.sglang_schemas import SGLangPause
from areal.inference.http.servers.vllm_group import VLLMGroupRoutes
from areal.inference.http.servers.vllm_schemas import VLLMPaused, VLLMResumed
from areal.weight_sync.transport import Transport

_KEEP = HTTPCall("/pause", Empty(), VLLMPaused, {"mode": "keep"})
_DROP = HTTPCall("/pause", Empty(), VLLMPaused, {"mode": "abort"})
_RESUME = HTTPCall("/resume", Empty(), VLLMResumed)
_SGLANG_PAUSE = HTTPCall("/pause_generation", SGLangPause(), Anything)
_SGLANG_RESUME = HTTPCall("/continue_generation", Empty(), Anything)


class ProcessGroupTransport(Transport):
    """Broadcasts from the rank that owns the servers. The next chunk is gathered while the current one is sent.

    A server that dies, hangs or refuses a tensor raises an error with its name on every rank, within ``timeout`` seconds. The update has
    then reached no server: all that had started it have lost their weights. They are refused until a later update has succeeded.

    Args:
        control: control plane over all ranks of the trainer.
        servers: owner of the servers, on the rank that has it; ``None`` on all others.
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

    unsent_note = (
        "version {version} was not sent; servers that had received some of it are refused until an update has succeeded"
    )

    def __init__(
        self,
        control: Control,
        servers: Servers | None,
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
            sender = GroupSender(
                servers, routes, carrier, chunk_bytes=chunk_bytes, packed_bytes=packed_bytes, timeout=timeout
            )
        super().__init__(control, sender, cast=cast)


class _StandaloneTransport(ProcessGroupTransport):
    """Owns its servers, and closes their connections."""

    servers: StandaloneServers | None

    def close(self) -> None:
        super().close()
        if self.servers is not None:
            self.servers.close()


class VLLMGroupTransport(_StandaloneTransport):
    """Broadcasts to vLLM servers that only this transport updates. Running requests are kept, and continue with the new weights.

    The servers need ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend": "nccl"}'``. A version's label, which
    ``GET /weight_info`` returns, is its number.

    Args:
        control: control plane over all ranks of the trainer. The first rank owns the servers.
        urls: base URLs of the servers.
        carrier: :class:`~areal.inference.http.group.NCCLCarrier`, or another one for which the servers have a backend.
        packed_bytes, chunk_bytes, cast, timeout: as in :class:`ProcessGroupTransport`.
        api_key: key that the servers ask for.

    Attributes:
        servers: the servers, on the first rank; ``None`` on all others.
    """

    def __init__(
        self,
        control: Control,
        urls: Sequence[str],
        carrier: Carrier,
        *,
        packed_bytes: int | None = PACKED_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        cast: torch.dtype | None = None,
        timeout: float = 60.0,
        api_key: str | None = None,
    ) -> None:
        self.servers = None
        if control.rank == 0:
            self.servers = StandaloneServers(
                urls, keep=_KEEP, drop=_DROP, resume=_RESUME, timeout=timeout, api_key=api_key
            )
        super().__init__(
            control,
            self.servers,
            VLLMGroupRoutes(),
            carrier,
            packed_bytes=packed_bytes,
            chunk_bytes=chunk_bytes,
            cast=cast,
            timeout=timeout,
        )


class SGLangGroupTransport(_StandaloneTransport):
    """Broadcasts to SGLang servers that only this transport updates. Running requests return with their tokens so far.

    Written from SGLang's source. It has not been run against a real server.

    Args:
        control: control plane over all ranks of the trainer. The first rank owns the servers.
        urls: base URLs of the servers.
        carrier: :class:`~areal.inference.http.group.TorchCarrier`, which joins a group as SGLang's workers do.
        chunk_bytes, cast, timeout: as in :class:`ProcessGroupTransport`.
        api_key: key that the servers ask for.

    Attributes:
        servers: the servers, on the first rank; ``None`` on all others.
    """

    def __init__(
        self,
        control: Control,
        urls: Sequence[str],
        carrier: Carrier,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        cast: torch.dtype | None = None,
        timeout: float = 60.0,
        api_key: str | None = None,
    ) -> None:
        self.servers = None
        if control.rank == 0:
            self.servers = StandaloneServers(
                urls, keep=_SGLANG_PAUSE, drop=_SGLANG_PAUSE, resume=_SGLANG_RESUME, timeout=timeout, api_key=api_key
            )
        super().__init__(
            control, self.servers, SGLangGroupRoutes(), carrier, chunk_bytes=chunk_bytes, cast=cast, timeout=timeout
        )
