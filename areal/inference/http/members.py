"""The servers of an owner as members of a process group that sends weights."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar

from areal.inference.http.fleet import Fleet
from areal.inference.http.label import Owner
from areal.inference.http.server import Server
from areal.inference.http.servers.http_call import HTTPCall, ReplyBody

R = TypeVar("R", bound=ReplyBody)


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
