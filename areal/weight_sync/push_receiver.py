"""Receive updates that a :class:`~areal.weight_sync.push.PushSender` pushes, and write them into a module."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from areal.engine.checkpoint.async_save import Observe, ignore
from areal.weight_sync.apply import Replica, Staging
from areal.weight_sync.bucket import BucketSlice
from areal.weight_sync.connection import Connection, Message, PeerLostError


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
        # Each message of the protocol and its reply, as listed in areal.weight_sync.push.
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
        except (ValueError, RuntimeError, OSError, EOFError) as error:
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
