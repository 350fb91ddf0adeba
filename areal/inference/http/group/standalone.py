"""Owner of servers that nobody else updates, for transports without a rollout engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from areal.inference.http.connection import ServerConnection
from areal.inference.http.loop_thread import LoopThread
from areal.inference.http.servers.call import HTTPCall
from areal.inference.http.servers.schemas import ReplyBody

R = TypeVar("R", bound=ReplyBody)


class StandaloneServers:
    """Implements :class:`~areal.inference.http.group.servers.Servers` on a fixed list of servers.

    A server with a fault stays paused after its requests were aborted. It continues when an update has succeeded.

    Args:
        urls: base URLs.
        keep: request that stops generation and keeps running requests, or returns them.
        drop: request that stops generation and returns running requests.
        resume: request that continues generation.
        timeout: seconds for each of these requests.
        api_key: key that the servers ask for.

    Attributes:
        faults: reason by URL of the servers without complete weights.

    Raises:
        ValueError: there is no URL, or one is repeated.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        keep: HTTPCall[ReplyBody],
        drop: HTTPCall[ReplyBody],
        resume: HTTPCall[ReplyBody],
        timeout: float,
        api_key: str | None = None,
    ) -> None:
        names = [url.rstrip("/") for url in urls]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"urls = {list(urls)}: give each server once, and at least one")
        self.faults: dict[str, str] = {}
        self._keep, self._drop, self._resume, self._timeout = keep, drop, resume, timeout
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._servers = {url: ServerConnection(url, headers) for url in names}
        self._loop: LoopThread | None = LoopThread("weight-servers")

    def members(self) -> Mapping[str, int]:
        return dict.fromkeys(self._servers, 0)

    def call(self, url: str, call: HTTPCall[R], seconds: float) -> Future[R]:
        return self._submit(self._servers[url].send(call, seconds))

    def label(self, version: int) -> str:
        return str(version)

    def hold(self) -> None:
        calls = [self.call(url, self._keep, self._timeout) for url in self._servers]
        _raise_first(calls)

    def release(self, version: int | None, faults: Mapping[str, str]) -> None:
        if version is not None:
            self.faults.clear()
        self.faults.update(faults)
        # They may be gone: errors are expected.
        dropped = [self.call(url, self._drop, self._timeout) for url in faults]
        calls = [self.call(url, self._resume, self._timeout) for url in self._servers if url not in self.faults]
        for call in dropped:
            with contextlib.suppress(RuntimeError, ValueError):
                call.result()
        _raise_first(calls)

    def close(self) -> None:
        """Close the connections. May be called twice."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.submit(self._close()).result()
            loop.close()

    async def _close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop is None:
            work.close()
            raise RuntimeError("the transport was closed: make another one")
        future: Future[Any] = self._loop.submit(work)
        return future


def _raise_first(calls: Sequence[Future[Any]]) -> None:
    """Wait for all calls, and raise the errors of those that failed as one."""
    errors: list[str] = []
    for call in calls:
        try:
            call.result()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    if errors:
        raise RuntimeError("; ".join(errors))
