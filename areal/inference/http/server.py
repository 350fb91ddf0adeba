"""One server: the version of its weights, whether it may be asked, and its updates."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Any, TypeVar

from areal.inference.http.answer import Answer
from areal.inference.http.label import LABEL_SECONDS, ServerLabel, WrongLabel
from areal.inference.http.owner import Owner
from areal.inference.http.server_connection import ServerConnection, StatusError, Unavailable, UnexpectedStatus
from areal.inference.http.servers.base_schemas import Anything, ReplyBody
from areal.inference.http.servers.call import HTTPCall
from areal.inference.http.servers.dialect import Dialect, ReplyPart, Routes
from areal.inference.http.update_times import UpdateTimes

R = TypeVar("R", bound=ReplyBody)

_PAUSE_AGAIN = 0.05
"""Seconds between two pauses of a server while requests are running."""


class Server:
    """One server. All methods run on one event loop.

    Replies of a server that was started anew must not count: its weights are those of its start. The server is given a label with each
    version. If its replies do not name the label, it is asked for it after each new connection, before a reply of that connection counts.

    Args:
        connection: connection to it.
        dialect: kind of server.
        owner: whose labels it gets.
        version: version of the weights that the server has now.

    Attributes:
        version: version of its weights; ``None`` if unknown. The server then gets no requests until the next update.
        why: reason for which ``version`` is unknown.
        routes: requests that it understands; ``None`` before the first contact.
        is_open: True unless an update is running.
        is_away: it could not be reached, and is not asked until it can.
        is_new: it was started anew, and does not have the current weights yet.
        restarts: number of times that it was started anew.
        requests: requests that are not answered yet.
        turn: lock of updates, and of loads after a restart.
    """

    def __init__(self, connection: ServerConnection, dialect: Dialect, owner: Owner, version: int) -> None:
        self.connection, self._dialect, self._owner = connection, dialect, owner
        self.url = connection.url
        self.version: int | None = version
        self.why = ""
        self.routes: Routes | None = None
        self.is_open, self.is_away, self.is_new, self.restarts = True, False, False, 0
        self.requests: set[asyncio.Task[Any]] = set()
        self.turn = asyncio.Lock()
        self._start_version: int | None = None  # version of the weights with which it starts, if known
        self._label = ServerLabel(connection, owner)
        self._taken = self._is_damaged = False  # by another owner; by a load that failed
        self._loaded: tuple[str, int] | None = None  # folder and version of the last successful load

    async def answers(self) -> bool:
        """Return whether the server can be reached and was examined."""
        try:
            await self.examine(LABEL_SECONDS)
            await self.connection.send(HTTPCall.get("/health", Anything), LABEL_SECONDS)
        except Unavailable as error:
            return error.status is not None
        except StatusError:
            pass  # an answer
        return True

    # ---- the label

    async def examine(self, seconds: float) -> None:
        """Choose routes by what the server offers, and claim it. Does nothing if that is done.

        Raises:
            ValueError: it is not started as needed, or belongs to another owner.
            RuntimeError: it does not answer as such a server does; :class:`Unavailable`: it cannot be reached.
        """
        if self.routes is not None:
            return
        if self._taken:
            raise RuntimeError(self.why)

        async def ask(call: HTTPCall[R]) -> R | None:
            try:
                return await self.connection.send(call, seconds)
            except (UnexpectedStatus, Unavailable) as error:
                if error.status in (403, 404, 405, 501):
                    return None
                raise

        try:
            routes = await self._dialect.examine(ask)
            found = await self._label.read(routes, seconds)
            self._owner.check(found)
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}") from error
        if routes.label is not None and self.version is not None:
            # Without a label of an owner, it has had no update: a restart brings the same weights back.
            self._start_version = self.version if found in (None, "default") else None
            await self._label.give(routes, self.version)
        self.routes = routes

    async def recognise(self, *, anew: bool = False) -> bool:
        """Return whether the server still has the weights of the last update, as its label says. If not, they are unknown from then on.

        Args:
            anew: ask also if no connection is new.
        """
        if anew:
            self._label.note_connection()
        if self.routes is not None and self.version is not None:
            try:
                await self._label.check(self.routes)
            except WrongLabel as error:
                self.mistake(error.found)
        return self.version is not None

    def mistake(self, found: str | None) -> None:
        """Note that the server has a label that this owner has not set."""
        if self.version is None:
            return
        self.routes = None
        other = self._owner.other(found)
        if other is not None:
            self._taken = True
            self.lose(f"{self.url} belongs to another HTTPRollout now, in {other}")
        else:
            self.lose(f"{self.url} has weights {found!r}, not version {self.version}: it was started anew")
            self.is_new = True
            self.restarts += 1

    # ---- generation

    async def generate(self, name: str, answer: Answer, seconds: float) -> tuple[ReplyPart, list[int]] | None:
        """Send one request. Returns tokens and their versions, or ``None`` if an update discarded it or the weights are not known.

        Raises:
            ValueError: the server rejects the request.
            RuntimeError: the reply cannot be, or its log-probs are not finite; :class:`Unavailable`: there is none.
        """
        routes, version = self.routes, self.version
        if routes is None or version is None:
            return None
        call = routes.generate(name, answer.prompt + answer.tokens, len(answer.tokens), answer.sampling, answer.seed)
        # A separate task, so that an update can cancel the request without cancelling the answer.
        request = asyncio.get_running_loop().create_task(self._ask(routes, call, version, answer, seconds))
        self.requests.add(request)
        try:
            await asyncio.wait({request})
        except asyncio.CancelledError:
            request.cancel()
            await asyncio.wait({request})
            abort = routes.abort(name)
            if abort is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    await asyncio.shield(self.connection.send(abort, 1.0))
            raise
        finally:
            self.requests.discard(request)
        return None if request.cancelled() else request.result()

    async def _ask(
        self, routes: Routes, call: HTTPCall[ReplyBody], version: int, answer: Answer, seconds: float
    ) -> tuple[ReplyPart, list[int]] | None:
        """Send a request, and read the reply. Its form was checked by the schema, here it is whether its content is possible."""
        try:
            body = await self.connection.send(call, seconds, self._label.note_connection)
        except StatusError as error:
            if routes.blames_weights(error.text):
                raise self._not_finite(str(error)) from error
            raise
        try:
            reply = routes.read_reply(body)
            answer.check(reply)
        except ValueError as error:
            raise RuntimeError(f"{self.url}{call.route}: the reply cannot be: {error}") from error
        if not all(map(math.isfinite, reply.logprobs)):
            raise self._not_finite(f"{self.url}{call.route}: {reply.logprobs}")
        if reply.labels is None:
            return (reply, [version] * len(reply.tokens)) if await self.recognise() else None
        try:
            return reply, self._label.versions(reply.labels, version, mixed=routes.keeps_requests)
        except WrongLabel as error:
            self.mistake(error.found)
            return None

    def _not_finite(self, what: str) -> RuntimeError:
        return RuntimeError(f"version {self.version} gives log-probs that are not finite: {what}")

    # ---- updates

    async def update(self, folder: str, version: int, times: UpdateTimes) -> str:
        """Pause the server, load a version and resume. Returns the error, or an empty string.

        A failed load may leave a server without weights, which would end it at the next request. The version before is loaded again.

        Args:
            folder: model directory, or that of an adapter, as an absolute path.
            version: version of its weights.
            times: time limits.
        """
        async with self.turn:
            self.is_open = False
            try:
                return await self._update(folder, version, times)
            finally:
                self.is_open = True

    async def _update(self, folder: str, version: int, times: UpdateTimes) -> str:
        fault = ""
        try:
            await self.hold(times)
            await self._load(folder, version, times.step)
        except (RuntimeError, ValueError) as error:
            fault = str(error) if self.url in str(error) else f"{self.url}: {error}"
            if isinstance(error, Unavailable) and error.status is None:
                self.miss(fault)
                return fault
            if self.version is None and self._loaded is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    await self._load(*self._loaded, times.step)
        return await self.release(fault, times)

    async def hold(self, times: UpdateTimes) -> None:
        """Pause the server for an update. Running requests have returned, or wait on the server for its end.

        Raises:
            RuntimeError, ValueError: it cannot be paused.
        """
        deadline = time.monotonic() + times.step
        routes = await self._known_routes(deadline)
        await self.connection.insist(routes.pause, deadline)
        if not routes.keeps_requests:
            await self._drain(routes, times.drain)

    async def release(self, fault: str, times: UpdateTimes) -> str:
        """End a pause, after an update that had this error or none. Returns the error."""
        routes = self.routes
        if routes is None:
            return fault
        # In any case: the old version is in use again, or the next update needs a running server.
        try:
            if self.version is None:
                # Requests that wait must not meet weights that are damaged.
                await self._drain(routes, times.drain)
            limit = times.drain if fault else times.step
            await self.connection.insist(routes.resume, time.monotonic() + limit)
        except (RuntimeError, ValueError) as error:
            fault = fault or str(error)
        return fault

    async def restore(self, current: tuple[str, int] | None, times: UpdateTimes) -> None:
        """Give a server that was started anew the current weights: the folder of the last update, or those with which it starts.

        Raises:
            RuntimeError, ValueError: it cannot load them, or they are unknown.
        """
        async with self.turn:
            if not self.is_new:
                return
            routes = await self._known_routes(time.monotonic() + times.step)
            if current is not None:
                await self._load(*current, times.step)
            elif self._start_version is not None:
                await self._label.give(routes, self._start_version)
                self.version, self.why = self._start_version, ""
            else:
                raise RuntimeError(self.why)
            # It may have been paused when it was lost.
            await self.connection.insist(routes.resume, time.monotonic() + times.step)
            self.is_new = False

    async def confirm(self, version: int) -> None:
        """Note that the server has a version whose weights came by another way than a folder."""
        if self.routes is not None:
            await self._label.give(self.routes, version)
        self.version, self.why, self.is_new = version, "", False
        self._loaded = self._start_version = None

    def miss(self, why: str) -> None:
        """Mark the server as gone in the middle of an update. When it is back, it gets the current weights first."""
        self.lose(why)
        self.is_away = self.is_new = True

    def lose(self, why: str) -> None:
        """Mark the version of the server's weights as unknown."""
        self.version, self.why = None, why

    async def _known_routes(self, deadline: float) -> Routes:
        """Return the routes, of a server that may have to be examined first."""
        while self.routes is None:
            try:
                await self.examine(max(0.05, deadline - time.monotonic()))
            except Unavailable:
                if self.connection.backoff_until >= deadline:
                    raise
                await asyncio.sleep(max(0.0, self.connection.backoff_until - time.monotonic()))
        return self.routes

    async def _load(self, folder: str, version: int, seconds: float) -> None:
        """Load a version. Its number is unknown until the server confirms: it may have loaded some of the weights."""
        routes = await self._known_routes(time.monotonic() + seconds)
        self.lose(f"{self.url} was told to load version {version}, and did not say that it has")
        call = routes.load(folder, self._owner.label(version))
        deadline = time.monotonic() + seconds
        # After a load of a wrong shape, vLLM refuses the next one too.
        again, self._is_damaged = self._is_damaged, True
        try:
            loaded = await self.connection.insist(call, deadline, fails=True)
        except Unavailable:
            if not again:
                raise
            loaded = await self.connection.insist(call, deadline, fails=True)
        routes.check_loaded(loaded)
        await self._label.give(routes, version)
        self._is_damaged = False
        self.version, self.why, self.is_new, self.is_away = version, "", False, False
        self._loaded = (folder, version)

    async def _drain(self, routes: Routes, seconds: float) -> None:
        """Wait for running requests, and cancel those that do not return.

        Requests that reach a server after a pause wait there. The next pause sends them back.
        """
        deadline = time.monotonic() + seconds
        while self.requests and time.monotonic() < deadline:
            _, running = await asyncio.wait(set(self.requests), timeout=min(_PAUSE_AGAIN, seconds))
            if running:
                await self.connection.insist(routes.interrupt, deadline)
        late = set(self.requests)
        for request in late:
            request.cancel()
        if late:
            await asyncio.wait(late)

    # ---- sleep

    async def sleep(self, seconds: float) -> str:
        """Pause the server and free its device memory. Returns the error, after which the server runs on, or an empty string."""
        try:
            routes = await self._known_routes(time.monotonic() + seconds)
            await self.connection.send(routes.interrupt, seconds)
            await self.connection.send(routes.sleep, seconds)
        except (RuntimeError, ValueError) as error:
            if self.routes is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    await self.connection.send(self.routes.resume, seconds)
            return str(error)
        return ""

    async def wake(self, seconds: float) -> str:
        """Take the device memory back, and resume. Returns the error, after which the weights are unknown, or an empty string."""
        try:
            routes = await self._known_routes(time.monotonic() + seconds)
            for call in (routes.wake, routes.resume):
                await self.connection.insist(call, time.monotonic() + seconds)
        except (RuntimeError, ValueError) as error:
            self.lose(f"{self.url} did not wake up")
            return str(error)
        if not routes.keeps_weights:
            self.lose(f"{self.url} has slept without a backup of its weights: send an update")
        return ""

    async def close(self) -> None:
        """Leave the server to others, and close the connections."""
        if self.routes is not None and not self.is_away:
            await self._label.release(self.routes, 2.0)
        await self.connection.close()
