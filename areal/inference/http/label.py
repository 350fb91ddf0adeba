"""The label that a server has with its weights: by it the weights are recognised, and two owners of one server are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import ClassVar

from areal.inference.http.server_connection import ServerConnection, Unavailable
from areal.inference.http.servers.dialect import Routes

LABEL_SECONDS = 10.0
"""Time limit of a request for a label."""

_MARK = "areal"


class Owner:
    """Owner of servers, named in the label of their weights: ``areal/HOST/PROCESS/NONCE/VERSION``.

    Args:
        take_over: take servers of an owner that may be alive.
    """

    _living: ClassVar[set[str]] = set()
    """Owners in this process."""

    def __init__(self, *, take_over: bool = False) -> None:
        self._take_over = take_over
        self._nonce = secrets.token_hex(4)
        self._prefix = f"{_MARK}/{socket.gethostname()}/{os.getpid()}/{self._nonce}/"
        self._living.add(self._nonce)

    def label(self, version: int) -> str:
        """Return the label of weights of this owner."""
        return f"{self._prefix}{version}"

    def version_of(self, label: str | None) -> int | None:
        """Return the version in a label, or ``None`` if it is none of this owner."""
        return int(label.rpartition("/")[2]) if label is not None and self._is_own(label) else None

    def other(self, label: str | None) -> str | None:
        """Return host and process of the owner in a label; ``None`` if it has none, or this one."""
        parts = label.split("/") if label is not None else []
        if len(parts) != 5 or parts[0] != _MARK or self._is_own("/".join(parts)):
            return None
        return f"process {parts[2]} of host {parts[1]}"

    def check(self, label: str | None) -> None:
        """Raise if a server with this label belongs to another owner that may be alive.

        Raises:
            ValueError: it does.
        """
        other = self.other(label)
        if other is None or label is None or self._take_over:
            return
        _, host, process, nonce, _ = label.split("/")
        if host == socket.gethostname():
            alive = nonce in self._living if int(process) == os.getpid() else _is_alive(int(process))
            if not alive:
                return
        raise ValueError(
            f"it belongs to another HTTPRollout, in {other}: give each its own servers, or let one rank own all of them (control=). "
            "If that one is gone, pass take_over=True"
        )

    def retire(self) -> None:
        """Leave the servers to others."""
        self._living.discard(self._nonce)

    def _is_own(self, label: str) -> bool:
        return label.startswith(self._prefix)


def _is_alive(process: int) -> bool:
    """Return whether a process of this host runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class WrongLabel(Exception):
    """A server has another label than the one that it was given.

    Args:
        found: label that it has; ``None`` if it has none.
    """

    def __init__(self, found: str | None) -> None:
        super().__init__(f"label {found!r}")
        self.found = found


class ServerLabel:
    """The label that an owner gives a server with each version of its weights.

    A server that was started anew has lost it. Servers without routes for labels are not asked, and take none.

    Args:
        connection: connection to the server.
        owner: whose labels it gets.

    Attributes:
        given: label that the server should have; ``None`` before the first one.
    """

    def __init__(self, connection: ServerConnection, owner: Owner) -> None:
        self._connection, self._owner = connection, owner
        self.given: str | None = None
        # Times on the monotonic clock: of the newest connection for generation, and of the start of the last check.
        self._connected = self._checked = 0.0
        self._checking = asyncio.Lock()

    def note_connection(self) -> None:
        """Note a new connection: it may lead to a server that was started anew."""
        self._connected = time.monotonic()

    async def read(self, routes: Routes, seconds: float) -> str | None:
        """Return the label that the server has.

        Raises:
            RuntimeError: it does not answer.
        """
        if routes.labels is None:
            return None
        return (await self._connection.send(routes.labels.read, seconds)).weight_version

    async def give(self, routes: Routes, version: int) -> None:
        """Set the label of a version.

        Raises:
            RuntimeError: the server does not take it.
        """
        self.given = self._owner.label(version)
        if routes.labels is not None:
            self._checked = time.monotonic()
            await self._connection.send(routes.labels.give(self.given), LABEL_SECONDS)

    async def insist(self, routes: Routes, version: int, seconds: float) -> None:
        """Call :meth:`give` until the server has the label. After a lost reply, the server's label tells whether it was set.

        Raises:
            WrongLabel: the server was started anew: it has neither the label of the version nor the one before.
            RuntimeError: it has not taken the label within ``seconds``.
        """
        before, deadline = self.given, time.monotonic() + seconds
        while True:
            try:
                return await self.give(routes, version)
            except Unavailable:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(max(0.0, self._connection.backoff_until - time.monotonic()))
            with contextlib.suppress(Unavailable):
                found = await self.read(routes, LABEL_SECONDS)
                if found == self.given:
                    return
                if found != before:
                    raise WrongLabel(found)

    async def check(self, routes: Routes) -> None:
        """Ask the server for its label, unless it was asked since the newest connection.

        Raises:
            WrongLabel: it is not the one that was given.
            RuntimeError: the server does not answer.
        """
        if routes.labels is None:
            return
        async with self._checking:
            # One check serves all connections that were there when it began.
            while self._checked <= self._connected:
                given, began = self.given, time.monotonic()
                found = await self.read(routes, LABEL_SECONDS)
                # Another one may have been given meanwhile.
                if self.given == given:
                    self._checked = began
                    if found != given:
                        raise WrongLabel(found)

    def versions(self, labels: Sequence[str], version: int, *, mixed: bool) -> list[int]:
        """Return the versions in the labels of a reply's tokens.

        Args:
            labels: one per token.
            version: version of the weights when the request was sent. Before the first label, all tokens have it.
            mixed: tokens may have other versions too: the server keeps requests across updates.

        Raises:
            WrongLabel: a label is not one of this owner, or has a version that cannot be.
        """
        if self.given is None:
            return [version] * len(labels)
        known: dict[str, int] = {}
        for label in set(labels):
            each = self._owner.version_of(label)
            if each is None or not (mixed or each == version):
                raise WrongLabel(label)
            known[label] = each
        return [known[label] for label in labels] if len(known) > 1 else list(known.values()) * len(labels)

    async def release(self, routes: Routes, seconds: float) -> None:
        """Take the label back, so that another owner may take the server. Failures are ignored."""
        if routes.labels is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                await self._connection.send(routes.labels.give("released"), seconds)
