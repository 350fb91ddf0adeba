"""The servers of an owner as members of a process group that sends weights."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar

from areal.inference.http.fleet import Fleet
from areal.inference.http.loop_thread import LoopThread
from areal.inference.http.owner import Owner
from areal.inference.http.server import Server
from areal.inference.http.servers.call import HTTPCall
from areal.inference.http.servers.schemas import ReplyBody

R = TypeVar("R", bound=ReplyBody)


class Members:
    """Implements :class:`~areal.inference.http.group.servers.Servers` by a fleet.

    Servers that are away when an update begins, or lose their weights in it, get no requests until a later update.

    Args:
        fleet: the servers.
        loop: event loop of the fleet.
        owner: whose labels the servers get.
    """

    def __init__(self, fleet: Fleet, loop: LoopThread, owner: Owner) -> None:
        self._fleet, self._loop, self._owner = fleet, loop, owner
        self._members: dict[str, Server] = {}

    def members(self) -> Mapping[str, int]:
        self._members = {server.url: server for server in self._loop.submit(self._fleet.reachable()).result()}
        return {url: server.restarts for url, server in self._members.items()}

    def call(self, url: str, call: HTTPCall[R], seconds: float) -> Future[R]:
        future: Future[R] = self._loop.submit(self._members[url].connection.send(call, seconds))
        return future

    def label(self, version: int) -> str:
        return self._owner.label(version)

    def hold(self) -> None:
        self._loop.submit(self._fleet.hold(self._list())).result()

    def release(self, version: int | None, faults: Mapping[str, str]) -> None:
        self._loop.submit(self._fleet.release(self._list(), version, faults)).result()

    def _list(self) -> list[Server]:
        return list(self._members.values())
