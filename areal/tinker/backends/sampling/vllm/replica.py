"""One of the vLLM servers of a sampler: requests to it, its adapters, and whether it answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from areal.inference.http.server_connection import RejectedCall, StatusError, Unavailable
from areal.inference.http.servers.http_call import Anything, HTTPCall, ReplyBody
from areal.inference.http.servers.vllm_schemas import VLLMLoadAdapter, VLLMUnloadAdapter
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.sampling.sampler_config import VLLMSamplerConfig
from areal.tinker.backends.sampling.vllm.connection import connect, reason_of

R = TypeVar("R", bound=ReplyBody)

_HEALTH_SECONDS, _UNLOAD_SECONDS = 5.0, 5.0
"""Time limits of a look at the server's health, and of removing an adapter."""

_ADD_FAILED = "add_lora method failed"
"""Part of the server's error if its workers cannot use an adapter."""


class NotAvailableError(ServerError):
    """The server cannot be reached, or has internal errors: another one may answer."""


@dataclass
class ServedSnapshot:
    """Snapshot on the servers.

    Attributes:
        name: name of the adapter there; ``None`` for the base model.
        folder: copy of the adapter; ``None`` for the base model.
        running: number of requests.
        released: whether it goes when the last request has ended.
    """

    name: str | None
    folder: Path | None
    running: int = 0
    released: bool = False


class VLLMReplica:
    """One server with the base model.

    Args:
        settings: limits of the sampler, and the key.
        url: base URL.
        base: name of the base model on the server.

    Attributes:
        running: number of requests for answers.
        alive: whether the server answered when it was last asked.
        seen: time on the monotonic clock of that.
    """

    def __init__(self, settings: VLLMSamplerConfig, url: str, base: str) -> None:
        self._settings, self._connection, self._base = settings, connect(settings, url), base
        self.running, self.alive, self.seen = 0, True, time.monotonic()

    @property
    def ready_at(self) -> float:
        """Time on the monotonic clock from which the server should get requests, after a fault."""
        return self._connection.backoff_until

    def name_of(self, served: ServedSnapshot) -> str:
        """Return the name of a snapshot on this server."""
        return served.name or self._base

    async def send(self, call: HTTPCall[R], seconds: float, until: float) -> R:
        """Send a request, again while the server is not available, until a time on the monotonic clock.

        Raises:
            StatusError: a status below 500.
            NotAvailableError: the server is still not available.
            ServerError: its reply does not have the documented form.
        """
        while True:
            try:
                reply = await self._connection.send(call, seconds)
            except Unavailable as error:
                # An adapter of other shapes is an internal error, too.
                if _ADD_FAILED in error.text:
                    raise UserError(f"the inference server refuses the adapter: {reason_of(error)}") from error
                self.alive, self.seen = False, time.monotonic()
                if self.ready_at >= until:
                    raise NotAvailableError(
                        f"the inference server is not available, send the request again: {error}"
                    ) from error
                await asyncio.sleep(max(0.0, self.ready_at - time.monotonic()))
            except StatusError:
                raise
            except RuntimeError as error:
                raise ServerError(f"the inference server's reply cannot be used: {error}") from error
            else:
                self.alive, self.seen = True, time.monotonic()
                return reply

    async def load(self, served: ServedSnapshot, until: float) -> None:
        """Load an adapter, unless it is there.

        Raises:
            UserError: the server refuses it.
            ServerError: the server does not load adapters, or failed.
        """
        body = VLLMLoadAdapter(lora_name=self.name_of(served), lora_path=str(served.folder))
        try:
            await self.send(HTTPCall("/v1/load_lora_adapter", body, Anything), self._settings.open_timeout, until)
        except StatusError as error:
            reason = reason_of(error)
            if "already been loaded" in reason:  # by another request
                return
            if isinstance(error, RejectedCall):
                raise UserError(f"the inference server refuses the adapter: {reason}") from error
            folder = None if served.folder is None else served.folder.parent
            raise ServerError(
                f"the inference server cannot load adapters: {reason}. Start it with --enable-lora and "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and give it access to {folder} (setting 'folder')"
            ) from error

    async def unload(self, served: ServedSnapshot) -> None:
        """Remove an adapter, as far as that is possible: a server that is dead or was started again does not have it."""
        call = HTTPCall("/v1/unload_lora_adapter", VLLMUnloadAdapter(lora_name=self.name_of(served)), Anything)
        with contextlib.suppress(RuntimeError, ValueError):
            await self._connection.send(call, _UNLOAD_SECONDS)

    async def look(self) -> None:
        """Ask the server for its health."""
        try:
            await self._connection.send(HTTPCall.get("/health", Anything), _HEALTH_SECONDS)
            self.alive = True
        except (RuntimeError, ValueError):
            self.alive = False
        self.seen = time.monotonic()

    async def close(self) -> None:
        """Close the connections."""
        self._connection.close()
