"""Updates that are pushed to receivers in other processes, bucket by bucket, whatever carries the buckets.

Over a line to each receiver goes: *update* (answered *ready*), *open* (*open*), a *bucket* message for each bucket that travels beside it,
*end* (*staged* once everything has arrived and fits, or *fault*), *commit* (*done*). Only then does a receiver touch its module, so that
an update that breaks off before leaves every receiver with what it had: the trainer then says *abort* (*aborted*), or is gone.
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
"""Most seconds that survivors have to answer once an update has broken off."""


class BufferPool(Protocol):
    """The trainer's end of what buckets travel through: two buffers, used in turn, so that one is filled while the other travels."""

    index: int
    """Which of the two buffers was lent last."""

    def info(self, members: Sequence[Connection]) -> list[dict[str, Any]]:
        """What each receiver must know to open its end."""
        ...

    def open(self, members: Sequence[Connection]) -> None:
        """Open this end, while receivers open theirs."""
        ...

    def acquire(self, update: int) -> Tensor:
        """The buffer whose turn it is, uint8 ``[N]``, once all have what was in it."""
        ...

    def send_bucket(self, used: int) -> None:
        """Start to send the first ``used`` bytes of the buffer that was lent last."""
        ...

    def flush(self, update: int) -> None:
        """Wait until all is on its way, and buffers are free."""
        ...

    def abort(self) -> None:
        """Break everything off, so that nobody waits. The next ``open`` starts afresh."""
        ...


class PushSender:
    """The trainer's end.

    Args:
        listener: where receivers call.
        buffers: takes the buckets.
        receivers: how many must be there; more may be.
        timeout: seconds that any answer may take.
        observe: told of each stage.
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
        self._members = self.listener.wait_for(self._receivers, self._timeout)
        self._update += 1
        try:
            self._send_all({"is": "update", "version": version, "kind": kind})
            for connection, _ in self._await_all("ready", self._members):
                self._ready.append(connection)
            self._observe("ready")
            for connection, info in zip(self._members, self._buffers.info(self._members), strict=True):
                connection.send({"is": "open", "update": self._update, **info})
            self._buffers.open(self._members)
            self._await_all("open", self._members)
        except Exception as error:
            self._abort_and_raise(error)
        self._observe("open")

    def transfer(self, tensors: OutgoingTensors) -> None:
        try:
            for i, bucket in enumerate(pack_buckets(tensors, lambda: self._buffers.acquire(self._update))):
                slices = [bucket_slice.to_json() for bucket_slice in bucket.slices]
                self._send_all({"is": "bucket", "used": bucket.used, "index": self._buffers.index, "slices": slices})
                self._buffers.send_bucket(bucket.used)
                self._observe(f"bucket {i}")
            self._buffers.flush(self._update)
            self._send_all({"is": "end", "n_tensors": tensors.meta.n_tensors})
            faults = [
                (connection, reply)
                for connection, reply in self._await_all("staged", self._members)
                if "fault" in reply
            ]
        except Exception as error:
            self._abort_and_raise(error)
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
        """Break the update off everywhere. Returns the receivers that are gone, and forgets them."""
        members, ready = self._members, self._ready
        self._members, self._ready = [], []
        if ready:
            self._buffers.abort()
        for connection in members:
            message = {"is": "abort", "update": self._update, "why": why}
            ignore_errors(functools.partial(connection.send, message))
        deadline = time.monotonic() + min(self._timeout, _GRACE)
        lost = [
            connection
            for connection in members
            if not self._has_aborted(connection, deadline, ready=connection in ready)
        ]
        self.listener.disconnect(lost)
        return lost

    def _has_aborted(self, connection: Connection, deadline: float, *, ready: bool) -> bool:
        """Whether a receiver has broken the update off. One that never joined it has nothing to say, but must be alive."""
        if not ready:
            return not _is_closed(connection)
        try:
            connection.expect("aborted", self._update, deadline)
        except PeerLostError:
            return False
        return True

    def _abort_and_raise(self, error: Exception) -> NoReturn:
        """Take the update back and raise, naming whoever is gone.

        Raises:
            PeerLostError: some receiver is gone. Else ``error``.
        """
        lost = self._abort_all(str(error))
        if not lost:
            raise error
        names = ", ".join(connection.name for connection in lost)
        raise PeerLostError(f"{names} is gone; the next update goes to those that are left") from error


def _is_closed(connection: Connection) -> bool:
    """Whether the other end has hung up. What it said before is passed over."""
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
    """A receiver's end of what buckets travel through."""

    def open(self, connection: Connection, info: Message) -> None:
        """Open it, while the trainer opens its own."""
        ...

    def receive_bucket(self, index: int, used: int) -> Tensor:
        """A bucket's bytes, uint8 ``[used]``, once they are there. To be read before the next is taken."""
        ...

    def release(self, connection: Connection, update: int) -> None:
        """Say that the bucket has been read, where the trainer waits for that."""
        ...

    def abort(self) -> None:
        """Break everything off. The next ``open`` starts afresh."""
        ...


class PushReceiver:
    """A receiver's end: a :class:`areal.api.WeightReceiver`.

    An update is held whole, in the module's dtypes on ``staging``, until the trainer commits it.

    Args:
        connection: to the trainer.
        bucket_receiver: gives the buckets.
        module: to be filled.
        timeout: seconds that the trainer may be silent in the middle of an update: at least what it takes to gather a bucket.
        staging: where an update is held.
        observe: told of each stage.
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
        """As :meth:`areal.api.WeightReceiver.receive`. An update that the trainer takes back is none; the wait goes on."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                message = self._connection.receive(deadline)
            except TimeoutError as error:
                raise TimeoutError(f"the trainer began no update within {timeout:g} s") from error
            except PeerLostError as error:
                raise self._trainer_lost(error) from error
            if message["is"] == "update" and self._run_update(message):
                return int(message["version"])

    def close(self) -> None:
        self._bucket_receiver.abort()
        self._connection.close()

    def _run_update(self, message: Message) -> bool:
        """Take one update. Returns whether it was committed."""
        update = _IncomingUpdate(
            message, self._connection, self._bucket_receiver, self._replica, self._staging, self._observe
        )
        try:
            while not update.finished:
                update.handle(self._connection.receive(time.monotonic() + self._timeout))
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
    """One update as it arrives. Its own faults wait until all receivers have everything, so that none is left alone with the carrier."""

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
        """Do what the trainer says."""
        if message["update"] != self._number:
            return
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
        """Use the carrier. What breaks it is told at once; the trainer then takes the update back."""
        if self._broken:
            return
        try:
            action()
        except (RuntimeError, OSError, EOFError) as error:
            self._broken = True
            self._bucket_receiver.abort()
            self._reply("broken", why=f"{type(error).__name__}: {error}")

    def _receive_bucket(self, message: Message) -> None:
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
