"""Lines between a trainer and its receivers, over which updates are agreed on: small messages, and word at once when an end dies.

Messages are JSON, so that nothing that arrives is run. Whoever can reach an address can join: keep it on a network, or in a directory, of
your own.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as PipeConnection
from pathlib import Path
from typing import Any

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

Message = dict[str, Any]

_LONGEST_PATH = 100
_RETRY_SECONDS = 0.05


class PeerLostError(RuntimeError):
    """The other end of a line died, or does not answer."""


class Connection:
    """One end of a line.

    Args:
        pipe: to the other end. name: of the other end, for errors.
    """

    def __init__(self, pipe: PipeConnection, name: str) -> None:
        self.pipe, self.name = pipe, name

    @classmethod
    def to(cls, address: Address, timeout: float) -> Connection:
        """Call a hub, which may have yet to be opened.

        Raises:
            PeerLostError: nobody listened there in ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            sock = socket.socket(_family(address))
            try:
                sock.connect(address)
                break
            except OSError as error:
                sock.close()
                if time.monotonic() >= deadline:
                    raise PeerLostError(f"no trainer listens at {address!r} after {timeout:g} s: {error}") from error
                time.sleep(_RETRY_SECONDS)
        connection = cls(_pipe_over(sock, timeout), "the trainer")
        connection.send({"name": f"{socket.gethostname()}:{os.getpid()}"})
        return connection

    def send(self, message: Message) -> None:
        """Raises:
        PeerLostError: the other end is gone, or has not read for too long.
        """
        try:
            self.pipe.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._lost_error(error) from error

    def receive(self, deadline: float | None) -> Message:
        """The next message. ``deadline`` is in the time of ``time.monotonic``; ``None`` waits for ever.

        Raises:
            TimeoutError: there was none. PeerLostError: the other end is gone.
        """
        try:
            if not self.pipe.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{self.name} did not answer")
            return json.loads(self.pipe.recv_bytes())
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:
            raise self._lost_error(error) from error

    def expect(self, what: str, update: int, deadline: float) -> Message:
        """The next message of that kind about an update. Those about other updates are passed over.

        Raises:
            PeerLostError: the other end is gone, does not answer in time, or says that it cannot go on.
        """
        while True:
            try:
                message = self.receive(deadline)
            except TimeoutError as error:
                raise PeerLostError(f"{self.name} does not answer (awaited: {what})") from error
            if message.get("update") != update:
                continue
            if message["is"] == "broken" and what != "aborted":
                raise PeerLostError(f"{self.name} cannot go on: {message['why']}")
            if message["is"] == what:
                return message

    def has_message(self) -> bool:
        """Whether a message is there, or the other end is gone."""
        try:
            return self.pipe.poll(0)
        except (OSError, EOFError):
            return True

    def close(self) -> None:
        self.pipe.close()

    def _lost_error(self, error: BaseException) -> PeerLostError:
        return PeerLostError(f"{self.name} is gone ({type(error).__name__})")


class Listener:
    """Where receivers call. Kept by one rank of the trainer.

    Args:
        address: with port 0, a free one is taken. A socket at a path is removed by :meth:`close`, and replaced when its owner is dead.
        timeout: seconds that a receiver may leave a message unread.

    Attributes:
        address: where it listens.
        connections: to the receivers that have called, in the order in which they did.

    Raises:
        ValueError: the address is taken, or is no place for a socket.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._timeout = timeout
        self.connections: list[Connection] = []
        if isinstance(address, str):
            _check_socket_path(address)
        self._socket = socket.socket(_family(address))
        try:
            if not isinstance(address, str):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise ValueError(f"address = {address!r} cannot be listened at: {error}") from error
        self._socket.listen(128)
        self.address: Address = address if isinstance(address, str) else self._socket.getsockname()[:2]

    def wait_for(self, n: int, timeout: float) -> list[Connection]:
        """The lines to all receivers that have called, at least ``n``.

        Raises:
            PeerLostError: fewer called in ``timeout`` seconds, or one of them is gone; it is forgotten.
        """
        deadline = time.monotonic() + timeout
        self._accept(0.0)
        while len(self.connections) < n:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerLostError(
                    f"{len(self.connections)} of {n} receivers have called at {self.address!r} within {timeout:g} s"
                )
            self._accept(left)
        return list(self.connections)

    def disconnect(self, connections: Sequence[Connection]) -> None:
        """Hang up."""
        for connection in connections:
            connection.close()
        self.connections = [connection for connection in self.connections if connection not in connections]

    def close(self) -> None:
        """Hang up on all, and listen no more."""
        self.disconnect(self.connections)
        if self._socket.fileno() >= 0:
            self._socket.close()
            if isinstance(self.address, str):
                Path(self.address).unlink(missing_ok=True)

    def _accept(self, timeout: float) -> None:
        """Answer one call, and with it all that wait already."""
        while True:
            self._socket.settimeout(max(timeout, 1e-3))
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                return
            sock.settimeout(None)
            connection = Connection(_pipe_over(sock, self._timeout), "a receiver")
            try:
                connection.name = f"receiver {connection.receive(time.monotonic() + self._timeout)['name']}"
            except (PeerLostError, TimeoutError, ValueError, KeyError):
                connection.close()
                continue
            self.connections.append(connection)
            timeout = 0.0


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET


def _pipe_over(sock: socket.socket, timeout: float) -> PipeConnection:
    """A connection over a socket whose writes give up after ``timeout`` seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return PipeConnection(sock.detach())


def _check_socket_path(path: str) -> None:
    """See that a socket can be made at a path: one whose owner is dead is removed."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(f"address = {path!r} is too long for a socket: give a path of at most {_LONGEST_PATH} bytes")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ValueError(f"address = {path!r} is a file: give the path of a socket that is to be made")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
