"""One server: its requests, its weights, and what is under way on it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TypeVar

import httpx2
from pydantic import ValidationError

from areal.trainer.rollout.http.dialects import Dialect, HTTPCall
from areal.trainer.rollout.http.schemas import ReplyBody

R = TypeVar("R", bound=ReplyBody)

_CONNECT_SECONDS = 10.0
_FIRST_REST, _LONGEST_REST = 0.1, 5.0
_SHOWN = 300
"""Most characters of a server's own words in an error."""


class Unavailable(RuntimeError):
    """It could not be reached, or says that something is wrong with it: another attempt may succeed."""


class Server:
    """A server and what is known of it. Used on one event loop.

    Attributes:
        url: where it is.
        version: of the weights that it has; ``None`` when that is not known, and nothing may then be asked of it.
        label: what it is to call them; ``None`` where it was not told yet.
        is_open: requests may be sent.
        flights: those that were, and have not come back.
        why: why ``version`` is not known.
    """

    def __init__(self, url: str, version: int) -> None:
        self.url = url.rstrip("/")
        self.version: int | None = version
        self.label: str | None = None
        self.is_open = True
        self.flights: set[asyncio.Task[ReplyBody]] = set()
        self.why = ""
        self.rests_until = 0.0
        self._faults = 0
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy of the outside world does not stand before it
        )

    async def send(self, call: HTTPCall[R], seconds: float) -> R:
        """One attempt.

        Raises:
            Unavailable: no connection, no answer in time, or a status of 500 and above.
            ValueError: the server refuses the request (400, 413, 422).
            RuntimeError: any other status, or a reply that is not of the form written down. All name server and route.
        """
        timeout = httpx2.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS), pool=None)
        body = call.body.model_dump(mode="json", exclude_none=True)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._http.post(call.route, json=body, params=dict(call.query), timeout=timeout)
        except (TimeoutError, httpx2.TimeoutException) as error:
            self._tire()
            raise Unavailable(f"{self.url}{call.route}: no answer within {seconds:.3g} s") from error
        except httpx2.TransportError as error:
            self._tire()
            raise Unavailable(f"{self.url}{call.route}: {type(error).__name__}: {error}") from error
        said = f"{self.url}{call.route}: status {answer.status_code}: {answer.text[:_SHOWN]}"
        if answer.status_code >= 500:
            self._tire()
            raise Unavailable(said)
        if answer.status_code in (400, 413, 422):
            raise ValueError(said)
        if answer.status_code != 200:
            raise RuntimeError(said)
        self._faults = 0
        return self._read(call, answer.content)

    async def insist(self, call: HTTPCall[R], deadline: float) -> R:
        """:meth:`send`, again and again until ``deadline`` on the monotonic clock."""
        while True:
            try:
                return await self.send(call, max(0.05, deadline - time.monotonic()))
            except Unavailable:
                if self.rests_until >= deadline:
                    raise
                await asyncio.sleep(max(0.0, self.rests_until - time.monotonic()))

    async def renew(self, dialect: Dialect, folder: str, version: int, seconds: float, drain_seconds: float) -> str:
        """Break off, load a version and go on, each step within ``seconds``. Returns what went wrong, if anything did."""
        self.is_open = False
        fault = ""
        try:
            await self.insist(dialect.pause, time.monotonic() + seconds)
            await self._drain(drain_seconds)
            self.lose(f"{self.url} was told to load version {version}, and did not say that it has")
            loaded = await self.insist(dialect.load(folder, version), time.monotonic() + seconds)
            dialect.check_loaded(loaded)
            self.version, self.label, self.why = version, str(version), ""
        except (RuntimeError, ValueError) as error:
            fault = str(error) if self.url in str(error) else f"{self.url}: {error}"
        try:
            await self.insist(dialect.resume, time.monotonic() + (drain_seconds if fault else seconds))
        except (RuntimeError, ValueError) as error:
            fault = fault or str(error)
        self.is_open = True
        return fault

    def lose(self, why: str) -> None:
        """Its weights are not known any more."""
        self.version, self.why = None, why

    async def _drain(self, seconds: float) -> None:
        """Wait for what is under way, and throw away what does not come: it reached the server after the pause did."""
        if not self.flights:
            return
        _, late = await asyncio.wait(set(self.flights), timeout=seconds)
        for flight in late:
            flight.cancel()
        if late:
            await asyncio.wait(late)

    async def close(self) -> None:
        await self._http.aclose()

    def _read(self, call: HTTPCall[R], content: bytes) -> R:
        if not call.reply.model_fields:
            return call.reply()
        try:
            return call.reply.model_validate(json.loads(content))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise RuntimeError(
                f"{self.url}{call.route}: the field {place!r} of the reply does not fit: {first['msg']}. Is it a server of this kind "
                "and of a release that is supported?"
            ) from error
        except ValueError as error:
            raise RuntimeError(f"{self.url}{call.route}: the reply is no JSON: {content[:_SHOWN]!r}") from error

    def _tire(self) -> None:
        if time.monotonic() < self.rests_until:
            return  # one fault, met by all that was under way
        self._faults += 1
        rest = min(_LONGEST_REST, _FIRST_REST * 2 ** (self._faults - 1))
        self.rests_until = time.monotonic() + rest * random.uniform(0.5, 1.0)
