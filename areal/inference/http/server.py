"""One server: its state, requests for answers, and updates of its weights."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import TypeVar

from areal.inference.http.answer import Answer
from areal.inference.http.concurrency_limit import ConcurrencyLimit
from areal.inference.http.in_flight import InFlight
from areal.inference.http.label import LABEL_SECONDS, Owner, ServerLabel, WrongLabel
from areal.inference.http.model_check import ModelCheck
from areal.inference.http.server_connection import (
    HEALTH,
    ClientLost,
    ServerConnection,
    StatusError,
    Unavailable,
    UnexpectedStatus,
)
from areal.inference.http.server_state import (
    Away,
    Lost,
    Outdated,
    ServerState,
    ServerWeights,
    Serving,
    Taken,
    UpdateTimes,
    Updating,
)
from areal.inference.http.servers.dialect import Dialect, ReplyPart, Routes
from areal.inference.http.servers.group_routes import INTERRUPTED
from areal.inference.http.servers.http_call import HTTPCall, ReplyBody

R = TypeVar("R", bound=ReplyBody)

_PAUSE_AGAIN = 0.05
"""Seconds between two pauses of a server while requests are running."""
_NOT_FINITE = "Out of range float values"
"""Python's words for a number that JSON cannot have: a log-prob that is not finite, due to the weights and not to the request."""


class Server:
    """One server. All methods run on one event loop.

    Replies of a server that was started anew must not count: its weights are those of its start. The server is given a label with each
    version. If its replies do not name the label, it is asked for it after each new connection, before a reply of that connection counts.

    Args:
        connection: connection to it.
        dialect: kind of server.
        owner: whose labels it gets.
        version: version of the weights that the server has now.
        model: the model that it must have.
        max_requests: maximum number of requests at once; ``None`` for no limit.

    Attributes:
        state: its weights, and whether it gets requests. Changed by :meth:`enter` only.
        routes: requests that it understands; ``None`` before the first contact.
        restarts: number of times that it was started anew.
        requests: requests that are not answered yet.
        turn: lock of updates, and of loads after a restart.
        loaded: weights of the last successful load; ``None`` if its weights came by another way.
    """

    def __init__(
        self,
        connection: ServerConnection,
        dialect: Dialect,
        owner: Owner,
        version: int,
        model: ModelCheck,
        max_requests: int | None = None,
    ) -> None:
        self.connection, self._dialect, self._owner, self._model = connection, dialect, owner, model
        self.url, self.restarts = connection.url, 0
        self.state: ServerState = Serving(version)
        self.routes: Routes | None = None
        self.requests = InFlight(None if max_requests is None else ConcurrencyLimit(max_requests))
        self.turn, self._label = asyncio.Lock(), ServerLabel(connection, owner)
        self.loaded: ServerWeights | None = None
        self._start_version: int | None = None  # version of the weights with which it starts, if known
        self._load_begun = False  # since it was started: it may have other weights

    @property
    def version(self) -> int | None:
        """Version of its weights; ``None`` if unknown."""
        return self.state.version

    @property
    def why(self) -> str:
        """Reason for which it gets no requests; empty if it gets them."""
        return self.state.why

    def enter(self, state: ServerState) -> None:
        """Enter a state. A server of another owner stays taken."""
        if not isinstance(self.state, Taken):
            self.state = state
            self.requests.open(isinstance(state, Serving))

    async def answers(self) -> bool:
        """Return whether the server can be reached and was examined."""
        try:
            await self.examine(LABEL_SECONDS)
            await self.connection.send(HEALTH, LABEL_SECONDS)
        except Unavailable as error:
            return error.status is not None
        except StatusError:
            pass  # an answer
        return True

    # ---- the label

    async def examine(self, seconds: float) -> None:
        """Choose routes by what the server offers, and claim it. Does nothing if that is done.

        Raises:
            ValueError: it is not started as needed, has another model, or belongs to another owner.
            RuntimeError: it does not answer as such a server does; :class:`Unavailable`: it cannot be reached.
        """
        if self.routes is not None:
            return
        if isinstance(self.state, Taken):
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
            # Version 0 is the model.
            start = self.version == 0 and found in (None, "default")
            await self._model.check(self.url, routes.served, ask, start=start)
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}") from error
        if self.version is not None:
            await self._claim(routes, found, self.version, seconds)
        self.routes = routes

    async def _claim(self, routes: Routes, found: str | None, version: int, seconds: float) -> None:
        """Label a server with the label ``found`` at the first contact, and end a pause of an earlier owner."""
        if found == INTERRUPTED:
            # Layers without weights would end the server at its next request. The label stays for the owner after this one.
            lost = Lost(f"{self.url} was interrupted in an update of an earlier owner: send an update")
            self.enter(Updating(lost) if isinstance(self.state, Updating) else lost)
            return
        if routes.labels is not None:
            # Without a label of an owner, it has had no update: a restart brings the same weights back.
            self._start_version = version if found in (None, "default") else None
            await self._label.give(routes, version)
        if found != "default":
            try:
                await self.connection.send(routes.pauses.resume, seconds)
            except StatusError:
                # Without routes for labels, it may be without this one.
                if found is not None:
                    raise

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

    async def meet_again(self, seconds: float) -> int | None:
        """Examine a server that was away. Returns the version of its weights, or ``None`` if it must load the current ones.

        Raises:
            ValueError, RuntimeError: see :meth:`examine`.
        """
        await self.examine(seconds)
        if self.version is None and self.routes is not None and self.routes.labels is not None:
            # It has missed an update. If it was started anew, too, it has no label of this owner.
            found = await self._label.read(self.routes, seconds)
            if self._owner.version_of(found) is None:
                self.mistake(found)
        await self.recognise(anew=True)
        # Another process may need other requests.
        await self.examine(seconds)
        return self.version

    def mistake(self, found: str | None) -> None:
        """Note that the server has a label that this owner has not set."""
        if self.version is None and not isinstance(self.state, Away):
            return  # counted once, however many replies show it
        self.routes, self._load_begun = None, False
        if (other := self._owner.other(found)) is not None:
            self.enter(Taken(f"{self.url} belongs to another HTTPRollout now, in {other}"))
            return
        self.restarts += 1
        wanted = "" if self.version is None else f", not version {self.version}"
        anew = Outdated(f"{self.url} has weights {found!r}{wanted}: it was started anew")
        self.enter(Updating(anew) if isinstance(self.state, Updating) else anew)

    # ---- generation

    async def generate(self, name: str, answer: Answer, silence: float) -> tuple[ReplyPart, list[int]] | None:
        """Send one request. Returns tokens and their versions, or ``None`` if it must be sent again: an update discarded it, its client
        process ended, or the weights are not known.

        Args:
            name: id of the request.
            answer: the answer to continue.
            silence: seconds without a reply after which the server must tell that it is healthy. Then the request goes on.

        Raises:
            ValueError: the server rejects the request, or takes no images.
            RuntimeError: the reply cannot be, or its log-probs are not finite; :class:`Unavailable`: there is none.
        """
        if (routes := self.routes) is None or (version := self.version) is None:
            return None
        call = answer.request(routes, name, version)
        # An update can discard the request without cancelling the answer.
        try:
            return await self.requests.run(self._ask(routes, call, version, answer, silence))
        except (asyncio.CancelledError, ClientLost) as error:
            abort = routes.abort(name)
            if abort is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    await asyncio.shield(self.connection.send(abort, 1.0))
            if not isinstance(error, ClientLost):
                raise
            return None

    async def _ask(
        self, routes: Routes, call: HTTPCall[ReplyBody], version: int, answer: Answer, silence: float
    ) -> tuple[ReplyPart, list[int]] | None:
        """Send a request, and check that the reply can be the next part of the answer."""
        began = time.monotonic()
        try:
            reply = await self.connection.generate(
                routes, call, answer.sampling, silence, self._label.note_connection, answer.note_life
            )
        except StatusError as error:
            if _NOT_FINITE in error.text:
                raise self._not_finite(str(error)) from error
            raise
        try:
            answer.check(reply)
        except ValueError as error:
            raise RuntimeError(f"{self.url}{call.route}: the reply cannot be: {error}") from error
        if self.requests.limit is not None:
            self.requests.limit.note(began, len(reply.tokens), len(self.requests))
        if not math.isfinite(sum(reply.logprobs)):
            raise self._not_finite(f"{self.url}{call.route}: {reply.logprobs}")
        if reply.labels is None:
            return (reply, [version] * len(reply.tokens)) if await self.recognise() else None
        try:
            return reply, self._label.versions(reply.labels, version, mixed=routes.pauses.keeps_requests)
        except WrongLabel as error:
            self.mistake(error.found)
            return None

    def _not_finite(self, what: str) -> RuntimeError:
        return RuntimeError(f"version {self.version} gives log-probs that are not finite: {what}")

    # ---- updates

    async def pause(self, times: UpdateTimes) -> None:
        """Pause the server for an update, until :meth:`resume`. Running requests have returned, or wait on the server for its end.

        Raises:
            RuntimeError, ValueError: it cannot be paused.
        """
        if not isinstance(self.state, Updating):
            self.enter(Updating(self.state))
        deadline = time.monotonic() + times.step
        routes = await self.known_routes(deadline)
        await self.connection.insist(routes.pauses.pause, deadline)
        if not routes.pauses.keeps_requests:
            await self._drain(routes, times.drain)

    async def resume(self, fault: str, times: UpdateTimes) -> str:
        """End a pause, after an update that had this error or none. Returns the error."""
        try:
            if self.version is None and self.routes is not None:
                # Requests that wait must not meet weights that are damaged.
                await self._drain(self.routes, times.drain)
            # In any case: the old version is in use again, or the next update needs a running server.
            await self.end_pause(times.drain if fault else times.step)
        except (RuntimeError, ValueError) as error:
            if not fault and isinstance(error, Unavailable) and error.status is None:
                # It has the version, and is resumed when it is back.
                self.enter(Away(self.version, str(error)))
            fault = fault or str(error)
        if isinstance(self.state, Updating):
            self.enter(self.state.then)
        if self.requests.limit is not None:
            self.requests.limit.restart()
        return fault

    async def load(self, weights: ServerWeights, seconds: float, *, again: bool) -> None:
        """Load weights from a folder, and set their label.

        Args:
            weights: weights in a folder that the server can read.
            seconds: time limit.
            again: send a load that fails once more. After a load of a wrong shape, vLLM refuses the next one too.

        Raises:
            RuntimeError, ValueError: it did not load them, or no folder has them.
        """
        if weights.folder is None:
            raise RuntimeError(f"{self.url} was away when version {weights.version} was sent: it gets the next one")
        deadline = time.monotonic() + seconds
        while True:
            routes = await self.known_routes(deadline)
            *before, call = routes.load(weights.folder, self._owner.label(weights.version))
            self._load_begun = True
            try:
                await self.connection.insist(call, deadline, fails=True, before=before)
            except Unavailable:
                if not again:
                    raise
                await self.connection.insist(call, deadline, fails=True, before=before)
            try:
                await self._label.insist(routes, weights.version, deadline - time.monotonic())
            except WrongLabel:
                # It was started anew after the load.
                self.routes = None
                self.restarts += 1
            else:
                self.loaded = weights
                return

    async def confirm(self, version: int) -> None:
        """Note that the paused server has a version whose weights came by another way. Raises if it does not take the label."""
        if self.routes is not None:
            try:
                await self._label.insist(self.routes, version, LABEL_SECONDS)
            except WrongLabel as error:
                raise RuntimeError(
                    f"{self.url} has weights {error.found!r}: it was started anew in the update"
                ) from error
        self.enter(Updating(Serving(version)))
        self.loaded = self._start_version = None

    async def end_pause(self, seconds: float) -> None:
        """Resume generation, if the server was examined."""
        if self.routes is not None:
            await self.connection.insist(self.routes.pauses.resume, time.monotonic() + seconds)

    async def label_start(self) -> int:
        """Label a server that was started anew before its first update: its weights are those that it had. Returns their version.

        Raises:
            RuntimeError: it had others, or has begun to load others.
        """
        if self._start_version is None or self.routes is None or self._load_begun:
            raise RuntimeError(self.why)
        await self._label.give(self.routes, self._start_version)
        return self._start_version

    async def known_routes(self, deadline: float) -> Routes:
        """Return the routes, of a server that may have to be examined first."""
        while self.routes is None:
            try:
                await self.examine(max(0.05, deadline - time.monotonic()))
            except Unavailable:
                if self.connection.backoff_until >= deadline:
                    raise
                await asyncio.sleep(max(0.0, self.connection.backoff_until - time.monotonic()))
        return self.routes

    async def _drain(self, routes: Routes, seconds: float) -> None:
        """Wait for running requests, and cancel those that do not return.

        Requests that reach a server after a pause wait there. The next pause sends them back.
        """
        deadline = time.monotonic() + seconds
        while len(self.requests) and time.monotonic() < deadline:
            if not await self.requests.end_within(min(_PAUSE_AGAIN, seconds)):
                await self.connection.insist(routes.pauses.interrupt, deadline)
        await self.requests.discard()

    async def close(self) -> None:
        """Leave the server to others, and close the connections."""
        if self.routes is not None and not isinstance(self.state, Away):
            await self._label.release(self.routes, 2.0)
        self.connection.close()
