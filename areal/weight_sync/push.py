"""Push updates to receivers in other processes, bucket by bucket, independent of how the buckets travel.

Messages on the control connection to each receiver, with the reply in parentheses: *update* (*ready*), *open*
(*open*), one *bucket* per bucket sent through the buffers, *end* (*staged* once all tensors have arrived and fit,
or *fault*), *commit* (*done*).

A receiver changes its module only at *commit*. If an update fails earlier, the trainer sends *abort* (*aborted*) or
dies, and every receiver keeps the weights that it had.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor

from areal.api.weights import UpdateKind, WeightUpdateMeta
from areal.engine.checkpoint.async_save import Observe, ignore
from areal.weight_sync.bucket import pack_buckets
from areal.weight_sync.connection import Connection, Listener, Message, PeerLostError
from areal.weight_sync.transport import OutgoingTensors, ignore_errors

_GRACE = 10.0
"""Maximum seconds that the remaining receivers have to answer after a failed update."""


class BufferPool(Protocol):
    """The trainer's two buffers for buckets, used in turn: one is filled while the other is being sent."""

    index: int
    """Index of the buffer that was acquired last, 0 or 1."""

    def info(self, members: Sequence[Connection]) -> list[dict[str, Any]]:
        """Return for each receiver the fields of its *open* message."""
        ...

    def open(self, members: Sequence[Connection]) -> None:
        """Open the trainer's end, while receivers open theirs."""
        ...

    def acquire(self, update: int) -> Tensor:
        """Return the next buffer, uint8 ``[N]``, once all receivers have read its previous content."""
        ...

    def send_bucket(self, used: int) -> None:
        """Start sending the first ``used`` bytes of the buffer that was acquired last."""
        ...

    def flush(self, update: int) -> None:
        """Wait until all buckets are sent and both buffers are free."""
        ...

    def abort(self) -> None:
        """Abort all transfers, so that no process keeps waiting. The next ``open`` starts anew."""
        ...


class PushSender:
    """The trainer's end of pushed updates: a :class:`~areal.weight_sync.transport.Sender`.

    Args:
        listener: accepts the receivers.
        buffers: transport of the buckets.
        receivers: minimum number of connected receivers before an update begins.
        timeout: seconds to wait for any answer of a receiver.
        observe: called with the name of each stage.
    """

    def __init__(
        self, listener: Listener, buffers: BufferPool, receivers: int, timeout: float, observe: Observe = ignore
    ) -> None:
        self.listener, self._buffers, self._observe = listener, buffers, observe
        self._receivers, self._timeout = receivers, timeout
        self._update = 0
        self._members: list[Connection] = []
        self._ready: list[Connection] = []

    def prepare(self, version: int, kind: UpdateKind) -> None:
        # Receivers may have joined since the last update; the update number keeps late answers to an earlier one
        # apart.
        self._members = self.listener.wait_for(self._receivers, self._timeout)
        self._update += 1
        try:
            self._send_all({"is": "update", "version": version, "kind": kind})
            # From "ready" on, a receiver takes part in the update and must acknowledge an abort.
            for connection, _ in self._await_all("ready", self._members):
                self._ready.append(connection)
            self._observe("ready")
            # Both ends open at the same time: a collective such as the broadcast group needs all of them.
            for connection, info in zip(self._members, self._buffers.info(self._members), strict=True):
                connection.send({"is": "open", "update": self._update, **info})
            self._buffers.open(self._members)
            self._await_all("open", self._members)
        except Exception as error:
            self._abort_and_raise(error)
        self._observe("open")

    def transfer(self, tensors: OutgoingTensors) -> None:
        try:
            # Announce each bucket on the control connections, then send its bytes.
            for i, bucket in enumerate(pack_buckets(tensors, lambda: self._buffers.acquire(self._update))):
                slices = [bucket_slice.to_json() for bucket_slice in bucket.slices]
                self._send_all({"is": "bucket", "used": bucket.used, "index": self._buffers.index, "slices": slices})
                self._buffers.send_bucket(bucket.used)
                self._observe(f"bucket {i}")
            # Receivers compare the tensors with their modules before any of them commits.
            self._buffers.flush(self._update)
            self._send_all({"is": "end", "n_tensors": tensors.meta.n_tensors})
            faults = [
                (connection, reply)
                for connection, reply in self._await_all("staged", self._members)
                if "fault" in reply
            ]
        except Exception as error:
            self._abort_and_raise(error)
        # A misfit on any receiver fails the update on all; the caller aborts it.
        if faults:
            text = "; ".join(f"{connection.name}: {reply['fault']}" for connection, reply in faults)
            raise (ValueError if all(reply["value"] for _, reply in faults) else RuntimeError)(text)
        self._observe("staged")

    def commit(self, meta: WeightUpdateMeta) -> None:
        try:
            self._send_all({"is": "commit"})
            self._observe("committed")
            self._await_all("done", self._members)
        except PeerLostError:
            # The update is committed on the others: only drop the dead receivers.
            self.listener.disconnect([connection for connection in self._members if _is_closed(connection)])
            raise
        finally:
            self._members, self._ready = [], []

    def abort(self, why: str) -> None:
        self._abort_all(why)

    def close(self) -> None:
        self._buffers.abort()
        self.listener.close()

    def _send_all(self, message: Message) -> None:
        for connection in self._members:
            connection.send({"update": self._update, **message})

    def _await_all(self, kind: str, connections: Sequence[Connection]) -> list[tuple[Connection, Message]]:
        deadline = time.monotonic() + self._timeout
        return [(connection, connection.expect(kind, self._update, deadline)) for connection in connections]

    def _abort_all(self, why: str) -> list[Connection]:
        """Abort the update on every receiver. Disconnect the receivers that are gone and return them."""
        members, ready = self._members, self._ready
        self._members, self._ready = [], []
        # Only receivers that were ready may be waiting in a transfer.
        if ready:
            self._buffers.abort()
        for connection in members:
            message = {"is": "abort", "update": self._update, "why": why}
            ignore_errors(functools.partial(connection.send, message))
        # All answers share one deadline, so that several dead receivers do not add up their timeouts.
        deadline = time.monotonic() + min(self._timeout, _GRACE)
        lost = [
            connection
            for connection in members
            if not self._has_aborted(connection, deadline, ready=connection in ready)
        ]
        self.listener.disconnect(lost)
        return lost

    def _has_aborted(self, connection: Connection, deadline: float, *, ready: bool) -> bool:
        """Return whether a receiver is alive and has aborted the update.

        One that was never ready only has to be alive.
        """
        if not ready:
            return not _is_closed(connection)
        try:
            connection.expect("aborted", self._update, deadline)
        except PeerLostError:
            return False
        return True

    def _abort_and_raise(self, error: Exception) -> NoReturn:
        """Abort the update and raise, naming the receivers that are gone.

        Raises:
            PeerLostError: a receiver is gone. Otherwise ``error`` is raised.
        """
        lost = self._abort_all(str(error))
        if not lost:
            raise error
        names = ", ".join(connection.name for connection in lost)
        raise PeerLostError(f"{names} is gone; the next update goes to those that are left") from error


def _is_closed(connection: Connection) -> bool:
    """Return whether the peer has closed the connection. Its earlier messages are discarded."""
    try:
        while connection.has_message():
            connection.receive(time.monotonic())
    except PeerLostError:
        return True
    except TimeoutError:
        pass
    return False
