"""A side channel between the ranks of an engine. It ends the engine on all ranks at once when one rank fails or is lost.

A rank that waits in a collective cannot learn on its own that a peer has left it: NCCL does not notice, and gloo notices a peer that died,
but not one that was stopped. Therefore one thread on each rank keeps a connection to rank 0, or on rank 0 to all other ranks. Each end sends
a beat twice a second. The first fault that reaches rank 0 becomes the verdict, which is the same on all ranks::

    rank 2: fault -> rank 0: verdict -> every rank: abort the process groups, and raise the verdict

A connection that closes, or is silent for too long, is a lost rank. The beats continue while the main thread of a rank computes or generates.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_PERIOD = 0.5
_CONNECT = 60.0
_SEND = 5.0
_GRACE = 2.0
_HOLD = 0.3


@dataclass(frozen=True)
class Verdict:
    """The fault that has ended an engine.

    Attributes:
        text: what happened, with the rank.
        way_out: what the user must do.
        lost: a rank is gone.
    """

    text: str
    way_out: str
    lost: bool = False

    def __str__(self) -> str:
        rest = f"the engine cannot be used any more: {self.way_out}"
        return f"{self.text}; {rest}" if self.lost else f"{self.text} ({rest})"


class FaultWatch:
    """Watches the other ranks in a daemon thread. The constructor is collective.

    Args:
        rank, size: of this process, and the number of ranks; at least 2.
        gather: returns a value of every rank, by rank. Used by the constructor alone.
        address: address of this host that the other ranks can reach.
        silence: seconds without a beat after which a rank is lost.
        on_verdict: called once, in the thread, when there is a verdict. Must not raise.

    Raises:
        RuntimeError: a rank cannot connect to rank 0; the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        gather: Callable[[Any], list[Any]],
        address: str,
        silence: float,
        on_verdict: Callable[[], None],
    ) -> None:
        self._rank, self._size, self._silence, self._on_verdict = rank, size, silence, on_verdict
        self._changed = threading.Condition()
        self._verdict: Verdict | None = None
        self._left: list[int] = []
        self._posted: deque[Verdict] = deque()
        self._held: Verdict | None = None
        self._held_since = 0.0
        self._closing = self._exiting = self._ended = False
        # Connect before the thread starts, so that no connection is made in the background.
        self._links = self._accept_all(gather, address) if rank == 0 else self._connect(gather)
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
        for link in self._links:
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._thread = threading.Thread(target=self._serve, name=f"fault watch of rank {rank}", daemon=True)
        self._thread.start()
        atexit.register(self._stop_at_exit)

    @property
    def verdict(self) -> Verdict | None:
        """The fault that has ended the engine, if any."""
        return self._verdict

    def post(self, fault: Verdict) -> Verdict:
        """Report a fault of this rank. Returns the verdict, which is another rank's fault if that came first."""
        self._posted.append(fault)
        self._notify()
        with self._changed:
            self._changed.wait_for(lambda: self._verdict or self._ended, self._silence + _SEND)
        # The other ranks have left.
        if self._verdict is None and self._decide(fault):
            self._on_verdict()
        return self._verdict or fault

    def after_failure(self, error: BaseException) -> Verdict:
        """Return the verdict after an exchange with other ranks has failed on this rank."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict or self._left, _GRACE)
        gone = ", ".join(map(str, self._left))
        text = (
            f"rank {gone} of {self._size} has left"
            if gone
            else f"rank {self._rank}: no exchange between ranks: {error}"
        )
        return self._verdict or self.post(Verdict(text, "make another", lost=bool(gone)))

    def close(self) -> None:
        """Tell the other ranks that this one leaves, and end the thread."""
        atexit.unregister(self._stop_at_exit)
        self._closing = True
        self._notify()
        self._thread.join(2 * _SEND)
        self._selector.close()
        for each in (*(link.socket for link in self._links), self._waker, self._woken):
            each.close()

    # ---- connections

    def _accept_all(self, gather: Callable[[Any], list[Any]], address: str) -> list[_Link]:
        """Connect rank 0 with all others."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        token, error = secrets.token_hex(16), ""
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.create_server((address, 0), family=family, backlog=self._size))
                gather((listener.getsockname()[:2], token))
            except OSError as failed:
                error = f"rank 0 cannot listen on {address}: {failed}"
                gather(None)
            _raise_any(gather(error))
            # All others have connected: the system has accepted them already. Anybody else may have connected, too.
            links: dict[int, _Link] = {}
            listener.settimeout(_CONNECT)
            while len(links) < self._size - 1:
                connection, _ = listener.accept()
                connection.settimeout(_SEND)
                link = _Link(connection, 0)
                rank = link.receive_hello(token)
                if rank is None:
                    connection.close()
                else:
                    link.rank = rank
                    links[rank] = link
        return list(links.values())

    def _connect(self, gather: Callable[[Any], list[Any]]) -> list[_Link]:
        """Connect to rank 0."""
        address, token = gather(None)[0] or (None, "")
        error, links = "", []
        if address is not None:
            try:
                connection = socket.create_connection(tuple(address), timeout=_CONNECT)
                connection.settimeout(_SEND)
                links.append(_Link(connection, 0))
                links[0].send({"token": token, "rank": self._rank})
            except OSError as failed:
                error = f"rank {self._rank} cannot connect to rank 0 at {address[0]}: {failed}; open its ports, or set GLOO_SOCKET_IFNAME"
        _raise_any(gather(error))
        return links

    # ---- the thread

    def _serve(self) -> None:
        """Exchange beats and faults until there is a verdict, or this rank or all others leave."""
        last, next_beat = time.monotonic(), 0.0
        while self._verdict is None and not self._closing and self._links:
            ready = [key.data for key, _ in self._selector.select(_HOLD if self._held else _PERIOD)]
            now = time.monotonic()
            # If this process was stopped itself, the beats of the others wait to be read.
            if now - last > self._silence / 2:
                for link in self._links:
                    link.seen = now
            last = now
            if self._woken in ready:
                self._woken.recv(4096)
            while self._posted:
                self._report(self._posted.popleft())
            lost = [link for link in ready if isinstance(link, _Link) and not self._read(link, now)]
            lost += [link for link in self._links if now - link.seen > self._silence]
            if now >= next_beat:
                next_beat = now + _PERIOD
                lost += [link for link in self._links if not link.send(None)]
            if lost:
                ranks = ", ".join(str(rank) for rank in sorted({link.rank for link in lost}))
                text = f"rank {ranks} of {self._size} is gone"
                self._end(Verdict(text, "restart the job from its last checkpoint", lost=True))
            elif self._held is not None and now - self._held_since > _HOLD:
                self._end(self._held)
        if self._held is not None:
            self._end(self._held)
        if not self._exiting:
            self._leave()

    def _stop_at_exit(self) -> None:
        """End the thread before the interpreter ends: it must not abort groups meanwhile. The other ranks see a rank that is gone."""
        self._exiting = self._closing = True
        self._notify()
        self._thread.join(_GRACE)

    def _report(self, fault: Verdict) -> None:
        """Send a fault to rank 0. Rank 0 holds the first one for a moment: its cause may be a rank that is lost, which comes next."""
        if self._rank != 0:
            self._links[0].send({"end": vars(fault)})
        elif self._held is None:
            self._held, self._held_since = fault, time.monotonic()

    def _read(self, link: _Link, now: float) -> bool:
        """Act on the messages of another rank. Returns False if it is lost."""
        messages = link.receive()
        link.seen = now
        for message in messages or ():
            if "end" in message:
                fault = Verdict(**message["end"])
                self._report(fault) if self._rank == 0 else self._end(fault)
            elif "bye" in message:
                self._selector.unregister(link.socket)
                self._links.remove(link)
                link.socket.close()
                with self._changed:
                    self._left.append(link.rank)
                    self._changed.notify_all()
                return True
        return messages is not None

    def _end(self, verdict: Verdict) -> None:
        """Accept a verdict. Rank 0 sends it to all others."""
        if self._decide(verdict):
            if self._rank == 0:
                for link in self._links:
                    link.send({"end": vars(verdict)})
            self._on_verdict()

    def _decide(self, verdict: Verdict) -> bool:
        """Set the verdict. Returns False if there is one already."""
        with self._changed:
            if self._verdict is not None:
                return False
            self._verdict = verdict
            self._changed.notify_all()
            return True

    def _leave(self) -> None:
        """End the connections, so that all that was sent arrives."""
        for link in self._links:
            if self._verdict is None:
                link.send({"bye": True})
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)
        # A socket that is closed with unread messages takes back those that were sent.
        deadline = time.monotonic() + _GRACE
        for link in self._links:
            while time.monotonic() < deadline and link.receive() is not None:
                pass
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _notify(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")


@dataclass(eq=False)
class _Link:
    """A connection to another rank. A message is a line of JSON, and a beat is an empty line.

    Attributes:
        socket: blocks for a few seconds at most.
        rank: rank at the other end.
        seen: time of the last message or beat.
    """

    socket: socket.socket
    rank: int
    seen: float = field(default_factory=time.monotonic)
    _unread: bytes = b""

    def send(self, message: dict[str, Any] | None) -> bool:
        """Send a message, or a beat. Returns False if that is impossible."""
        try:
            self.socket.sendall((json.dumps(message) if message else "").encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, after a wait for at least one byte. ``None``: the connection is closed or timed out."""
        try:
            data = self.socket.recv(65536)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def receive_hello(self, token: str) -> int | None:
        """Return the rank at the other end, which begins with the token. ``None``: not a rank of this engine."""
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            messages: list[dict[str, Any]] | None = []
            while messages == [] and len(self._unread) < 1000:
                messages = self.receive()
            if messages and secrets.compare_digest(messages[0]["token"], token):
                return int(messages[0]["rank"])
        return None


def _raise_any(errors: list[str]) -> None:
    """Raise the errors of all ranks."""
    if any(errors):
        raise RuntimeError("; ".join(error for error in errors if error))
