"""Connection to one server: requests, retries with back-off, and the version of its weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Mapping
from typing import TypeVar

import httpx2
from pydantic import ValidationError

from areal.trainer.rollout.http.dialects import Dialect, HTTPCall
from areal.trainer.rollout.http.schemas import ReplyBody

R = TypeVar("R", bound=ReplyBody)

_CONNECT_SECONDS = 10.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 5.0
"""Seconds without new requests after the first fault, doubled with each further fault in a row, up to the maximum."""
_SHOWN = 300
"""Maximum number of characters of a server's reply in an error message."""


class Unavailable(RuntimeError):
    """The server could not be reached or reports an internal error: another attempt may succeed.

    Attributes:
        text: body of the answer; empty if there was none.
    """

    def __init__(self, report: str, text: str = "") -> None:
        super().__init__(report)
        self.text = text


class StatusError(Exception):
    """The server answered with a status other than 200, below 500.

    Attributes:
        status: status of the answer.
        text: body of the answer.
    """

    def __init__(self, report: str, status: int, text: str) -> None:
        super().__init__(report)
        self.status, self.text = status, text


class RejectedCall(StatusError, ValueError):
    """Status 400, 413 or 422: the request is wrong."""


class UnexpectedStatus(StatusError, RuntimeError):
    """Any other status."""


class Server:
    """One server. All methods run on one event loop.

    Args:
        url: base URL.
        version: version of the weights that the server has now.
        headers: headers of each request, such as an API key.

    Attributes:
        url: base URL.
        version: version of its weights; ``None`` if unknown. The server then gets no requests until the next update.
        label: name of the weights that the server must report; ``None`` before the first update.
        is_open: True unless an update is running.
        requests: requests that are not answered yet.
        why: reason for which ``version`` is unknown.
        backoff_until: time on the monotonic clock until which the server gets no new requests, after a fault.
    """

    def __init__(self, url: str, version: int, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.version: int | None = version
        self.label: str | None = None
        self.is_open = True
        self.requests: set[asyncio.Task[ReplyBody]] = set()
        self.why = ""
        self.backoff_until = 0.0
        self._faults = 0
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # servers are in the cluster: no proxy
        )

    async def send(self, call: HTTPCall[R], seconds: float) -> R:
        """Send one request, without retries. Errors name the server and the route.

        Args:
            call: route, body and type of the reply.
            seconds: time limit, including generation.

        Raises:
            Unavailable: the connection failed, the time limit passed, or the status is 500 or above.
            RejectedCall: the server rejects the request (400, 413, 422).
            RuntimeError: any other status (:class:`UnexpectedStatus`), or a reply that does not have the documented form.
        """
        # The pool is unbounded, so waiting for a connection needs no limit.
        timeout = httpx2.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS), pool=None)
        body = None if call.method == "GET" else call.body.model_dump(mode="json", exclude_none=True)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._http.request(
                    call.method, call.route, json=body, params=dict(call.query), timeout=timeout
                )
        except (TimeoutError, httpx2.TimeoutException) as error:
            self._back_off()
            raise Unavailable(f"{self.url}{call.route}: no answer within {seconds:.3g} s") from error
        except httpx2.TransportError as error:
            self._back_off()
            raise Unavailable(f"{self.url}{call.route}: {type(error).__name__}: {error}") from error
        # Server errors may be retried; rejected requests may not.
        report = f"{self.url}{call.route}: status {answer.status_code}: {answer.text[:_SHOWN]}"
        if answer.status_code >= 500:
            self._back_off()
            raise Unavailable(report, answer.text)
        if answer.status_code in (400, 413, 422):
            raise RejectedCall(report, answer.status_code, answer.text)
        if answer.status_code != 200:
            raise UnexpectedStatus(report, answer.status_code, answer.text)
        self._faults = 0
        return self._read(call, answer.content)

    async def insist(self, call: HTTPCall[R], deadline: float) -> R:
        """Call :meth:`send` until it succeeds or ``deadline``, on the monotonic clock, passes."""
        while True:
            try:
                return await self.send(call, max(0.05, deadline - time.monotonic()))
            except Unavailable:
                if self.backoff_until >= deadline:
                    raise
                await asyncio.sleep(max(0.0, self.backoff_until - time.monotonic()))

    async def load_version(
        self, dialect: Dialect, folder: str, version: int, seconds: float, drain_seconds: float
    ) -> str:
        """Pause the server, load a version and resume, each step within ``seconds``. Returns the error, or an empty string.

        Args:
            dialect: kind of server.
            folder: model directory, as an absolute path.
            version: version of its weights.
            seconds: time limit of each step.
            drain_seconds: time limit for interrupted requests to return.
        """
        self.is_open = False
        fault = ""
        try:
            await self.insist(dialect.pause, time.monotonic() + seconds)
            await self._drain(drain_seconds)
            # Unknown from here until the server confirms: it may have loaded some of the weights.
            self.lose(f"{self.url} was told to load version {version}, and did not say that it has")
            loaded = await self.insist(dialect.load(folder, version), time.monotonic() + seconds)
            dialect.check_loaded(loaded)
            self.version, self.label, self.why = version, str(version), ""
        except (RuntimeError, ValueError) as error:
            fault = str(error) if self.url in str(error) else f"{self.url}: {error}"
        # Resume in any case: the old version is in use again, or the next update needs a running server.
        try:
            await self.insist(dialect.resume, time.monotonic() + (drain_seconds if fault else seconds))
        except (RuntimeError, ValueError) as error:
            fault = fault or str(error)
        self.is_open = True
        return fault

    async def sleep(self, dialect: Dialect, seconds: float) -> str:
        """Pause the server and free its device memory. Returns the error, after which the server runs on, or an empty string."""
        try:
            await self.send(dialect.pause, seconds)
            await self.send(dialect.sleep, seconds)
        except (RuntimeError, ValueError) as error:
            with contextlib.suppress(RuntimeError, ValueError):
                await self.send(dialect.resume, seconds)
            return str(error)
        return ""

    async def wake(self, dialect: Dialect, seconds: float) -> str:
        """Take the device memory back, and resume. Returns the error, after which the weights are unknown, or an empty string."""
        try:
            for call in (dialect.wake, dialect.resume):
                await self.insist(call, time.monotonic() + seconds)
        except (RuntimeError, ValueError) as error:
            self.lose(f"{self.url} did not wake up")
            return str(error)
        if not dialect.keeps_weights:
            self.lose(f"{self.url} has slept without a backup of its weights: send an update")
        return ""

    def lose(self, why: str) -> None:
        """Mark the version of the server's weights as unknown."""
        self.version, self.why = None, why

    async def _drain(self, seconds: float) -> None:
        """Wait for running requests, and cancel late ones: those reached the server after the pause."""
        if not self.requests:
            return
        _, late = await asyncio.wait(set(self.requests), timeout=seconds)
        for request in late:
            request.cancel()
        if late:
            await asyncio.wait(late)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _read(self, call: HTTPCall[R], content: bytes) -> R:
        """Parse and validate a reply."""
        # Some routes reply with text or nothing.
        if not call.reply.model_fields:
            return call.reply()
        try:
            return call.reply.model_validate(json.loads(content))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(key) for key in first["loc"])
            raise RuntimeError(
                f"{self.url}{call.route}: the field {field!r} of the reply does not fit: {first['msg']}. Is it a server of this kind "
                "and of a release that is supported?"
            ) from error
        except ValueError as error:
            raise RuntimeError(f"{self.url}{call.route}: the reply is no JSON: {content[:_SHOWN]!r}") from error

    def _back_off(self) -> None:
        """Send no new requests for a while. Randomised, so that several engines do not retry together."""
        if time.monotonic() < self.backoff_until:
            return  # one fault, seen by all requests that were running
        self._faults += 1
        seconds = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** (self._faults - 1))
        self.backoff_until = time.monotonic() + seconds * random.uniform(0.5, 1.0)
