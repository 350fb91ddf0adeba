"""Control connections between a trainer and its receivers: small JSON messages and immediate detection of a dead peer.

JSON is never executed. Any process that can reach the address can connect: use a private network or a private
directory.
"""

from __future__ import annotations

import json
import os
import secrets
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
_BACKLOG = 128
"""Receivers that may connect while an update runs."""


class PeerLostError(RuntimeError):
    """The peer of a connection died or does not answer."""


class Connection:
    """One end of a control connection.

    Args:
        pipe: connection to the peer.
        name: name of the peer in error messages.
    """

    def __init__(self, pipe: PipeConnection, name: str) -> None:
        self.pipe, self.name = pipe, name

    @classmethod
    def to(cls, address: Address, timeout: float) -> Connection:
        """Connect to a listener, which may open later.

        Raises:
            PeerLostError: no process listened there within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            # A socket that failed to connect cannot be used again on every system: make a new one per attempt.
            sock = socket.socket(_family(address))
            try:
                sock.connect(address)
                break
            except OSError as error:
                sock.close()
                if time.monotonic() >= deadline:
                    raise PeerLostError(f"no trainer listens at {address!r} after {timeout:g} s: {error}") from error
                time.sleep(_RETRY_SECONDS)
        # The first message carries this process's name, for the trainer's errors.
        connection = cls(_pipe_over(sock, timeout), "the trainer")
        connection.send({"name": f"{socket.gethostname()}:{os.getpid()}"})
        return connection

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            PeerLostError: the peer is gone, or did not read for too long.
        """
        try:
            self.pipe.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._lost_error(error) from error

    def receive(self, deadline: float | None) -> Message:
        """Return the next message. ``deadline`` is a time of ``time.monotonic``; ``None`` waits without limit.

        Raises:
            TimeoutError: no message arrived in time.
            PeerLostError: the peer is gone.
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
        """Return the next message of kind ``what`` about an update. Messages about other updates are discarded.

        Raises:
            PeerLostError: the peer is gone, does not answer in time, or reports that it cannot continue.
        """
        while True:
            try:
                message = self.receive(deadline)
            except TimeoutError as error:
                raise PeerLostError(f"{self.name} does not answer (awaited: {what})") from error
            # Replies to an aborted update may arrive during the next one.
            if message.get("update") != update:
                continue
            # While an abort is acknowledged, an earlier "broken" adds nothing.
            if message["is"] == "broken" and what != "aborted":
                raise PeerLostError(f"{self.name} cannot go on: {message['why']}")
            if message["is"] == what:
                return message

    def has_message(self) -> bool:
        """Return whether a message can be read, or the peer is gone."""
        try:
            return self.pipe.poll(0)
        except (OSError, EOFError):
            return True

    def close(self) -> None:
        self.pipe.close()

    def _lost_error(self, error: BaseException) -> PeerLostError:
        return PeerLostError(f"{self.name} is gone ({type(error).__name__})")


class Listener:
    """Accepts the connections of receivers. Only one rank of the trainer has it.

    Args:
        address: host and port, or a path. Port 0 selects a free one. :meth:`close` removes a socket at a path; a
            socket of a dead process is replaced.
        timeout: seconds that a receiver may leave a message unread.

    Attributes:
        address: address with the selected port.
        connections: list of connections to the receivers, in the order of their arrival.

    Raises:
        ValueError: the address is taken, or no socket can be created there.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._timeout = timeout
        self.connections: list[Connection] = []
        # A Unix socket leaves a file: remove that of a dead process first.
        if isinstance(address, str):
            _check_socket_path(address)
        self._socket = socket.socket(_family(address))
        try:
            _listen(self._socket, address)
        except OSError as error:
            self._socket.close()
            raise ValueError(f"address = {address!r} cannot be listened at: {error}") from error
        self.address: Address = address if isinstance(address, str) else self._socket.getsockname()[:2]

    def wait_for(self, n: int, timeout: float) -> list[Connection]:
        """Accept waiting receivers until at least ``n`` are connected, and return all connections.

        Raises:
            PeerLostError: fewer than ``n`` connected within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        # More receivers than needed may be waiting: take all of them.
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
        """Close connections and remove them."""
        for connection in connections:
            connection.close()
        self.connections = [connection for connection in self.connections if connection not in connections]

    def close(self) -> None:
        """Close all connections and stop listening."""
        self.disconnect(self.connections)
        if self._socket.fileno() >= 0:
            self._socket.close()
            if isinstance(self.address, str):
                Path(self.address).unlink(missing_ok=True)

    def _accept(self, timeout: float) -> None:
        """Accept one receiver, and all others that already wait."""
        while True:
            self._socket.settimeout(max(timeout, 1e-3))
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                return
            # The accepted socket blocks; the limit for writes is set by _pipe_over.
            sock.settimeout(None)
            connection = Connection(_pipe_over(sock, self._timeout), "a receiver")
            try:
                connection.name = f"receiver {connection.receive(time.monotonic() + self._timeout)['name']}"
            # A process that does not introduce itself is not a receiver.
            except (PeerLostError, TimeoutError, ValueError, KeyError):
                connection.close()
                continue
            self.connections.append(connection)
            # Continue without waiting: take only what is queued.
            timeout = 0.0


def _listen(sock: socket.socket, address: Address) -> None:
    """Listen at an address, which becomes visible when a connection would be accepted."""
    if not isinstance(address, str):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        return
    # A socket that is bound and does not listen yet would be taken for that of a dead process.
    own = _own_path(address)
    sock.bind(own)
    try:
        sock.listen(_BACKLOG)
        os.link(own, address)
    finally:
        os.unlink(own)


def _own_path(path: str) -> str:
    """Return a path next to another, which no other process uses."""
    return os.path.join(os.path.dirname(path), f".{secrets.token_hex(4)}")


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET


def _pipe_over(sock: socket.socket, timeout: float) -> PipeConnection:
    """Return a message connection over a socket. Writes fail after ``timeout`` seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
    if sock.family != socket.AF_UNIX:
        # Messages are small and latency counts; keep-alive detects a host that disappeared.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return PipeConnection(sock.detach())


def _check_socket_path(path: str) -> None:
    """Check that a socket can be created at a path, and remove the socket of a dead process."""
    if max(len(os.fsencode(each)) for each in (path, _own_path(path))) > _LONGEST_PATH:
        raise ValueError(f"address = {path!r} is too long for a socket: give a path of at most {_LONGEST_PATH} bytes")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ValueError(f"address = {path!r} is a file: give the path of a socket that is to be made")
    except FileNotFoundError:
        return
    # A refused connection means that no process listens: the file is a leftover.
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
