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
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from areal.api.weights import UpdateKind, WeightUpdateMeta
from areal.engine.checkpoint.async_save import Observe, ignore
from areal.weight_sync.apply import Replica, Staging
from areal.weight_sync.bucket import BucketSlice, pack_buckets
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


# ---- receiving


class BucketReceiver(Protocol):
    """A receiver's end of the transport of buckets."""

    def open(self, connection: Connection, info: Message) -> None:
        """Open the receiver's end with the fields of the *open* message, while the trainer opens its own."""
        ...

    def receive_bucket(self, index: int, used: int) -> Tensor:
        """Wait for a bucket and return its bytes, uint8 ``[used]``. They are valid until the next call."""
        ...

    def release(self, connection: Connection, update: int) -> None:
        """Report that the bucket has been read, if the trainer waits for that."""
        ...

    def abort(self) -> None:
        """Abort all transfers. The next ``open`` starts anew."""
        ...


class PushReceiver:
    """A receiver's end of pushed updates: an :class:`areal.api.WeightReceiver`.

    The full update is staged in the dtypes of the module until the trainer commits it.

    Args:
        connection: control connection to the trainer.
        bucket_receiver: transport of the buckets.
        module: module to update.
        timeout: seconds that the trainer may be silent during an update, at least the time to gather a bucket.
        staging: device of the staged update.
        observe: called with the name of each stage.
    """

    def __init__(
        self,
        connection: Connection,
        bucket_receiver: BucketReceiver,
        module: nn.Module,
        *,
        timeout: float,
        staging: torch.device | str = "cpu",
        observe: Observe = ignore,
    ) -> None:
        self._connection, self._bucket_receiver, self._observe = connection, bucket_receiver, observe
        self._replica, self._staging = Replica(module), torch.device(staging)
        self._timeout = timeout

    @property
    def version(self) -> int | None:
        return self._replica.version

    def pending(self) -> bool:
        return self._connection.has_message()

    def receive(self, timeout: float | None = None) -> int:
        """Implement :meth:`areal.api.WeightReceiver.receive`.

        After an aborted update, continue waiting for the next one.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                message = self._connection.receive(deadline)
            except TimeoutError as error:
                raise TimeoutError(f"the trainer began no update within {timeout:g} s") from error
            except PeerLostError as error:
                raise self._trainer_lost(error) from error
            # Answers to an earlier, aborted update may still arrive: skip them.
            if message["is"] == "update" and self._run_update(message):
                return int(message["version"])

    def close(self) -> None:
        self._bucket_receiver.abort()
        self._connection.close()

    def _run_update(self, message: Message) -> bool:
        """Run one update to its end and return whether it was committed."""
        update = _IncomingUpdate(
            message, self._connection, self._bucket_receiver, self._replica, self._staging, self._observe
        )
        try:
            while not update.finished:
                update.handle(self._connection.receive(time.monotonic() + self._timeout))
        # The trainer is gone or silent: the module still has the previous version.
        except (PeerLostError, TimeoutError) as error:
            self._bucket_receiver.abort()
            raise self._trainer_lost(error) from error
        if update.fault is not None:
            raise update.fault
        return update.committed

    def _trainer_lost(self, error: Exception) -> PeerLostError:
        serves = "no version was received" if self.version is None else f"version {self.version} serves"
        return PeerLostError(f"{error}; {serves}")


class _IncomingUpdate:
    """One update while it arrives.

    A misfit of this receiver is reported only after the last bucket, so that all receivers take part in all
    transfers.
    """

    def __init__(
        self,
        message: Message,
        connection: Connection,
        bucket_receiver: BucketReceiver,
        replica: Replica,
        device: torch.device,
        observe: Observe,
    ) -> None:
        self._number, self._version = message["update"], int(message["version"])
        self._connection, self._bucket_receiver, self._observe = connection, bucket_receiver, observe
        self._staging = Staging(replica, complete=message["kind"] == "full", device=device)
        self._broken = self.finished = self.committed = False
        self.fault: Exception | None = None
        self._reply("ready")

    def handle(self, message: Message) -> None:
        """Handle one message of the trainer."""
        if message["update"] != self._number:
            return
        # Each message of the protocol and its reply, see the top of this module.
        match message["is"]:
            case "open":
                self._attempt(lambda: self._bucket_receiver.open(self._connection, message))
                if not self._broken:
                    self._reply("open")
            case "bucket":
                self._attempt(lambda: self._receive_bucket(message))
                self._observe("bucket")
            case "end":
                self._check_complete(message)
            case "commit":
                self._staging.commit(self._version)
                self.finished = self.committed = True
                self._observe("committed")
                self._reply("done")
            case "abort":
                self.finished = True
                self._bucket_receiver.abort()
                self._reply("aborted")

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run a transfer. On failure report it at once, so that the trainer aborts the update."""
        if self._broken:
            return
        try:
            action()
        except (RuntimeError, OSError, EOFError) as error:
            self._broken = True
            self._bucket_receiver.abort()
            self._reply("broken", why=f"{type(error).__name__}: {error}")

    def _receive_bucket(self, message: Message) -> None:
        # Receive even after a fault: the other receivers depend on this one in a broadcast.
        data = self._bucket_receiver.receive_bucket(message["index"], message["used"])
        try:
            if self.fault is None:
                for bucket_slice in map(BucketSlice.from_json, message["slices"]):
                    self._staging.put_slice(bucket_slice, bucket_slice.view(data))
        except (ValueError, RuntimeError) as error:
            self.fault = error
        self._bucket_receiver.release(self._connection, self._number)

    def _check_complete(self, message: Message) -> None:
        try:
            # The update is complete if every tensor arrived in full, and as many as the trainer has sent.
            if self.fault is None:
                self._staging.check()
                if self._staging.n_tensors != message["n_tensors"]:
                    raise RuntimeError(
                        f"{self._staging.n_tensors} tensors arrived, and the trainer sent {message['n_tensors']}"
                    )
        except (ValueError, RuntimeError) as error:
            self.fault = error
        self._observe("staged")
        if self.fault is None:
            self._reply("staged")
        else:
            self._reply("staged", fault=str(self.fault), value=isinstance(self.fault, ValueError))

    def _reply(self, kind: str, **more: Any) -> None:
        self._connection.send({"is": kind, "update": self._number, **more})
