"""The servers of an update that load tensors as they come, on the rank that owns them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from areal.api.weights import UpdateKind, WeightUpdateMeta
from areal.inference.http.fleet import Fleet
from areal.inference.http.group.carrier import Meeting, in_thread
from areal.inference.http.label import Owner
from areal.inference.http.server import Server
from areal.inference.http.server_connection import Unavailable
from areal.inference.http.servers.group_routes import GroupRoutes
from areal.inference.http.servers.http_call import HTTPCall, ReplyBody
from areal.weight_sync.transport import ignore_errors

R = TypeVar("R", bound=ReplyBody)

INTERRUPTED_NOTE = (
    "version {version} was not sent; servers that had received some of it are refused until an update has succeeded"
)
"""Added to the error of an update of servers that load tensors as they come."""

_RECOVER_SECONDS = 5.0
"""Time limit of a request that cleans up after an interrupted update."""


class GroupSender:
    """Implements :class:`~areal.weight_sync.transport.Sender` for inference servers. A transfer consists of rounds.

    One group has the trainer and the workers of all servers. It is created with the first update, and again after a fault, or when servers
    have come, gone or restarted. Servers generate until the first round. They load tensors as they come, so that a server that is
    interrupted has lost its weights.

    Args:
        servers: the servers.
        routes: requests of the servers' kind.
        carrier: place where the trainer and the workers meet.
        packed_bytes: size of packed buffers; ``None`` to send tensors one by one.
        timeout: seconds for each request, and for all members to join or to receive a chunk.

    Attributes:
        size: number of members of the group; 0 without a group.
    """

    def __init__(
        self,
        servers: Members,
        routes: GroupRoutes,
        carrier: Meeting,
        *,
        packed_bytes: int | None,
        timeout: float,
    ) -> None:
        self._servers, self._routes, self._carrier = servers, routes, carrier
        self._packed_bytes, self._timeout = packed_bytes, timeout
        self.size = 0
        self._joined: dict[str, int] = {}  # workers by URL of the group's servers
        self._starts: dict[str, int] = {}  # numbers of restarts of the group's servers, as their fleet counts
        self._labels: dict[str, str | None] = {}  # label that each server must have, unless it was restarted
        self._interrupted: set[str] = set()  # servers whose update was started and not finished
        self._fresh = False  # the group has had no update yet
        self._held = False
        self._round: Round | None = None

    def prepare(self, version: int, kind: UpdateKind) -> None:
        if kind != "full":
            raise ValueError("select: servers over a process group receive all tensors; leave it None, or use the disk")
        self._end_interrupted()
        starts = dict(self._servers.members())
        members = list(starts)
        # Those that are away need nothing more: with their return, another group begins.
        self._interrupted &= starts.keys()
        labels = {url: reply.weight_version for url, reply in self._ask(members, self._routes.label).items()}
        # A restarted process is not a member of the group any more. Its owner knows, or its label has changed.
        restarted = [url for url in members if url in self._labels and labels[url] != self._labels[url]]
        if self._starts != starts or restarted or self._interrupted:
            self._make_group(members)
        self._starts, self._labels = starts, labels

    def start_round(
        self, what: str, call: HTTPCall[ReplyBody], work: Callable[[], None], seconds: float | None = None
    ) -> None:
        """Send a request to all servers, with a call of the carrier at the same time. Ends the last round before. Does not wait.

        The first round stops generation, and starts the update.

        Args:
            what: name of the round, for errors.
            call: request, which returns when the tensors of the round are loaded.
            work: call of the carrier.
            seconds: time limit of the round.
        """
        self.end_round()
        if not self._held:
            self._start()
        seconds = seconds or self._timeout
        calls = {url: self._servers.call(url, call, seconds) for url in self._joined}
        self._round = Round(what, calls, self._carrier, work, seconds)

    def end_round(self) -> None:
        """Wait until the tensors of the last round are loaded.

        Raises:
            RuntimeError: a server or the carrier failed, or did not answer in time. Names the servers.
        """
        if self._round is not None:
            self._round.end()
            self._round = None

    def commit(self, meta: WeightUpdateMeta) -> None:
        label = self._servers.label(meta.version)
        errors = self._each(list(self._joined), self._routes.finish(label))
        faults = {url: str(error) for url, error in errors.items()}
        for url in self._joined:
            if url not in faults:
                self._interrupted.discard(url)
                self._labels[url] = label
        self._held = False
        self._servers.release(meta.version, faults)
        if faults:
            raise RuntimeError("; ".join(faults.values()))

    def abort(self, why: str) -> None:
        self._round, aborted = None, self._round is not None
        if self._interrupted or aborted:
            self._leave()
        faults = {url: f"{url} was interrupted in an update: {why}" for url in self._interrupted}
        # Layers without weights would end the server at the next request.
        interrupted = list(self._interrupted)
        try:
            self._recover(interrupted)
            self._each(interrupted, self._routes.leave, min(self._timeout, _RECOVER_SECONDS))
        finally:
            if self._held:
                self._held = False
                ignore_errors(lambda: self._servers.release(None, faults))

    def close(self) -> None:
        self._end_interrupted()
        members = list(self._joined)
        self._leave()
        self._each(members, self._routes.leave, min(self._timeout, _RECOVER_SECONDS))

    def _end_interrupted(self) -> None:
        """Abort an update that was interrupted outside of the transfer."""
        if self._held:
            self.abort("its end was interrupted")

    # ---- the group

    def _make_group(self, members: Sequence[str]) -> None:
        """Leave the last group, and create another one."""
        self._leave()
        # Members that did not notice the end of the last group; there may be none.
        self._each(members, self._routes.leave, min(self._timeout, _RECOVER_SECONDS))
        self._join(members)

    def _join(self, members: Sequence[str]) -> None:
        """Create a group with the trainer and all workers of the members."""
        sizes = {
            url: self._routes.read_workers(reply) for url, reply in self._ask(members, self._routes.workers).items()
        }
        size = 1 + sum(sizes.values())
        where = self._carrier.open(size)
        calls: dict[str, Future[Any]] = {}
        offset = 1
        for url in members:
            call = self._routes.join(where, offset, size, self._packed_bytes)
            calls[url] = self._servers.call(url, call, self._timeout)
            offset += sizes[url]
        Round(
            "the process group was not made",
            calls,
            self._carrier,
            lambda: self._carrier.join(self._timeout),
            self._timeout,
        ).end()
        self._joined, self.size, self._fresh = sizes, size, True

    def _leave(self) -> None:
        """Leave the group: the next update makes another one."""
        self._carrier.abort()
        self._joined, self._starts, self.size = {}, {}, 0

    def _recover(self, urls: Sequence[str]) -> None:
        """Bring servers into a state from which an update can start. Errors are left to that start."""
        left = list(urls)
        for call in self._routes.recover:
            errors = self._each(left, [call], min(self._timeout, _RECOVER_SECONDS))
            # A server that does not answer would not answer the other requests.
            left = [url for url in left if not _is_unanswered(errors.get(url))]

    # ---- one update

    def _start(self) -> None:
        """Stop generation, and start the update on all servers."""
        self._held = True
        self._servers.hold()
        members = list(self._joined)
        # A server may have started even if its answer is lost.
        self._interrupted.update(members)
        # This or an earlier trainer may have left them in the middle of an update.
        if self._fresh:
            self._recover(members)
            self._fresh = False
        errors = self._each(members, self._routes.start)
        if errors:
            raise RuntimeError("; ".join(map(str, errors.values())))

    # ---- requests

    def _ask(self, urls: Sequence[str], call: HTTPCall[R]) -> dict[str, R]:
        """Send a request to servers at once, and return the replies by URL."""
        futures = self._call(urls, call, self._timeout)
        return {url: future.result() for url, future in futures.items()}

    def _call(self, urls: Sequence[str], call: HTTPCall[R], seconds: float) -> dict[str, Future[R]]:
        """Send a request to servers at once, and wait for the replies."""
        futures = {url: self._servers.call(url, call, seconds) for url in urls}
        wait(futures.values())
        # A server closes a connection after an error, and may do so when the next request is on its way.
        again = {url: self._servers.call(url, call, seconds) for url in urls if is_gone(futures[url].exception())}
        wait(again.values())
        return {**futures, **again}

    def _each(
        self, urls: Sequence[str], calls: Sequence[HTTPCall[ReplyBody]], seconds: float | None = None
    ) -> dict[str, BaseException]:
        """Send requests to each server in turn, to all servers at once. Returns errors by URL; a server ends with its first."""
        errors: dict[str, BaseException] = {}
        for call in calls:
            futures = self._call([url for url in urls if url not in errors], call, seconds or self._timeout)
            errors.update({url: error for url, future in futures.items() if (error := future.exception()) is not None})
        return errors


def _is_unanswered(error: BaseException | None) -> bool:
    return isinstance(error, Unavailable) and error.status is None


_NAMING_SECONDS = 2.0
"""Time for the servers to say what went wrong, after the carrier has failed."""


class Round:
    """Requests that end together with a call of the carrier. Started at once.

    Args:
        what: name of the work, for errors.
        calls: requests by URL.
        carrier: carrier, which is aborted after an error.
        work: call of the carrier.
        seconds: time limit.
    """

    def __init__(
        self, what: str, calls: Mapping[str, Future[Any]], carrier: Meeting, work: Callable[[], None], seconds: float
    ) -> None:
        self._what, self._calls, self._carrier = what, dict(calls), carrier
        self._deadline, self._seconds = time.monotonic() + seconds, seconds
        self._work = in_thread(work, "weight-carrier")

    def end(self) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: a server failed, or did not answer in time, or the carrier failed. Names the servers.
        """
        everything = [self._work, *self._calls.values()]
        done, _ = wait(everything, max(0.0, self._deadline - time.monotonic()), FIRST_EXCEPTION)
        if len(done) == len(everything) and not any(each.exception() for each in done):
            return
        # Servers that failed by themselves, before the carrier left the others alone.
        first = self.failed()
        if not first and self._work in done:
            wait(self._calls.values(), _NAMING_SECONDS, FIRST_EXCEPTION)
            first = self.failed()
        silent = self._silent() if not first and self._work not in done else {}
        self._carrier.abort()
        wait(everything, _NAMING_SECONDS)
        # A server that is gone explains the errors of the others.
        gone = {url: text for url, text in self.failed().items() if is_gone(self._calls[url].exception())}
        own = self._work.exception() if self._work.done() else None
        texts = list((gone or {**first, **silent, **self.failed()}).values()) or ([str(own)] if own else [])
        raise RuntimeError(f"{self._what}: {'; '.join(texts) or f'it did not end within {self._seconds:g} s'}")

    def on_error(self, react: Callable[[], None]) -> None:
        """Call a function, from another thread, as soon as a request fails."""

        def look(call: Future[Any]) -> None:
            if call.cancelled() or call.exception() is not None:
                react()

        for call in self._calls.values():
            call.add_done_callback(look)

    def failed(self) -> dict[str, str]:
        """Return the errors of the requests so far, by URL."""
        return {url: str(call.exception()) for url, call in self._calls.items() if call.done() and call.exception()}

    def _silent(self) -> dict[str, str]:
        return {
            url: f"{url}: no answer within {self._seconds:g} s" for url, call in self._calls.items() if not call.done()
        }


def is_gone(error: BaseException | None) -> bool:
    """Return True for the error of a request whose connection was refused or closed. A time limit may be the fault of another server."""
    if not isinstance(error, Unavailable) or error.status is not None:
        return False
    return not isinstance(error.__cause__, TimeoutError)


class Members:
    """The servers of a fleet that receive an update together. Called from the thread of the trainer, which waits for each call.

    Servers that are away when an update begins, or lose their weights in it, get no requests until a later update.

    Args:
        fleet: the servers.
        owner: whose labels the servers get.
    """

    def __init__(self, fleet: Fleet, owner: Owner) -> None:
        self._fleet, self._owner = fleet, owner
        self._members: dict[str, Server] = {}

    def members(self) -> Mapping[str, int]:
        """Return the servers that can be reached, for the next update: URL -> number of restarts that the fleet has noticed.

        Raises:
            RuntimeError: no server is left.
        """
        self._members = {server.url: server for server in self._fleet.submit(self._fleet.reachable()).result()}
        return {url: server.restarts for url, server in self._members.items()}

    def lost(self) -> tuple[list[str], int]:
        """Return the members of the last update that do not answer any more, and the number of servers that do."""
        try:
            reachable = {server.url for server in self._fleet.submit(self._fleet.reachable()).result()}
        except RuntimeError:
            reachable = set()
        return [url for url in self._members if url not in reachable], len(reachable)

    def call(self, url: str, call: HTTPCall[R], seconds: float) -> Future[R]:
        """Send a request to a member, without retries. Returns at once.

        The future raises :class:`~areal.inference.http.server_connection.Unavailable`, another ``RuntimeError`` or a ``ValueError`` that
        names the server.
        """
        return self._fleet.submit(self._members[url].connection.send(call, seconds))

    def label(self, version: int) -> str:
        """Return the name that the servers give the weights of a version."""
        return self._owner.label(version)

    def hold(self) -> None:
        """Stop generation on all members, until :meth:`release`; see :meth:`Fleet.hold`."""
        self._fleet.submit(self._fleet.hold(self._list())).result()

    def release(self, version: int | None, faults: Mapping[str, str]) -> None:
        """Continue generation on all members. Called once after each :meth:`hold`, also if that failed; see :meth:`Fleet.release`."""
        self._fleet.submit(self._fleet.release(self._list(), version, faults)).result()

    def _list(self) -> list[Server]:
        return list(self._members.values())
