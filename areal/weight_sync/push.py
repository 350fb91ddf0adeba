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
from areal.weight_sync.transport import Outgoing, quietly

_GRACE = 10.0
"""Most seconds that survivors have to answer once an update has broken off."""


class Carrier(Protocol):
    """The trainer's end of what buckets travel through: two buffers, used in turn, so that one is filled while the other travels."""

    turn: int
    """Which of the two buffers was lent last."""

    def terms(self, members: Sequence[Connection]) -> list[dict[str, Any]]:
        """What each receiver must know to open its end."""
        ...

    def open(self, members: Sequence[Connection]) -> None:
        """Open this end, while receivers open theirs."""
        ...

    def lend(self, update: int) -> Tensor:
        """The buffer whose turn it is, uint8 ``[N]``, once all have what was in it."""
        ...

    def ship(self, used: int) -> None:
        """Start to send the first ``used`` bytes of the buffer that was lent last."""
        ...

    def drain(self, update: int) -> None:
        """Wait until all is on its way, and buffers are free."""
        ...

    def drop(self) -> None:
        """Break everything off, so that nobody waits. The next ``open`` starts afresh."""
        ...


class PushSender:
    """The trainer's end.

    Args:
        hub: where receivers call.
        carrier: takes the buckets.
        receivers: how many must be there; more may be.
        timeout: seconds that any answer may take.
        observe: told of each stage.
    """

    def __init__(
        self, hub: Listener, carrier: Carrier, receivers: int, timeout: float, observe: Observe = ignore
    ) -> None:
        self.hub, self._carrier, self._observe = hub, carrier, observe
        self._receivers, self._timeout = receivers, timeout
        self._update = 0
        self._members: list[Connection] = []
        self._joined: list[Connection] = []

    def prepare(self, version: int, kind: UpdateKind) -> None:
        self._members = self.hub.gather(self._receivers, self._timeout)
        self._update += 1
        try:
            self._tell({"is": "update", "version": version, "kind": kind})
            for line, _ in self._answers("ready", self._members):
                self._joined.append(line)
            self._observe("ready")
            for line, terms in zip(self._members, self._carrier.terms(self._members), strict=True):
                line.send({"is": "open", "update": self._update, **terms})
            self._carrier.open(self._members)
            self._answers("open", self._members)
        except Exception as error:
            self._broke_off(error)
        self._observe("open")

    def bring(self, tensors: Outgoing) -> None:
        try:
            for i, bucket in enumerate(pack_buckets(tensors, lambda: self._carrier.lend(self._update))):
                pieces = [piece.to_json() for piece in bucket.pieces]
                self._tell({"is": "bucket", "used": bucket.used, "turn": self._carrier.turn, "pieces": pieces})
                self._carrier.ship(bucket.used)
                self._observe(f"bucket {i}")
            self._carrier.drain(self._update)
            self._tell({"is": "end", "n_tensors": tensors.meta.n_tensors})
            faults = [(line, answer) for line, answer in self._answers("staged", self._members) if "fault" in answer]
        except Exception as error:
            self._broke_off(error)
        if faults:
            text = "; ".join(f"{line.name}: {answer['fault']}" for line, answer in faults)
            raise (ValueError if all(answer["value"] for _, answer in faults) else RuntimeError)(text)
        self._observe("staged")

    def commit(self, meta: WeightUpdateMeta) -> None:
        try:
            self._tell({"is": "commit"})
            self._observe("committed")
            self._answers("done", self._members)
        except PeerLostError:
            self.hub.forget([line for line in self._members if _is_dead(line)])
            raise
        finally:
            self._members, self._joined = [], []

    def abort(self, why: str) -> None:
        self._take_back(why)

    def close(self) -> None:
        self._carrier.drop()
        self.hub.close()

    def _tell(self, message: Message) -> None:
        for line in self._members:
            line.send({"update": self._update, **message})

    def _answers(self, what: str, lines: Sequence[Connection]) -> list[tuple[Connection, Message]]:
        deadline = time.monotonic() + self._timeout
        return [(line, line.expect(what, self._update, deadline)) for line in lines]

    def _take_back(self, why: str) -> list[Connection]:
        """Break the update off everywhere. Returns the receivers that are gone, and forgets them."""
        members, joined = self._members, self._joined
        self._members, self._joined = [], []
        if joined:
            self._carrier.drop()
        for line in members:
            message = {"is": "abort", "update": self._update, "why": why}
            quietly(functools.partial(line.send, message))
        deadline = time.monotonic() + min(self._timeout, _GRACE)
        lost = [line for line in members if not self._has_let_go(line, deadline, joined=line in joined)]
        self.hub.forget(lost)
        return lost

    def _has_let_go(self, line: Connection, deadline: float, *, joined: bool) -> bool:
        """Whether a receiver has broken the update off. One that never joined it has nothing to say, but must be alive."""
        if not joined:
            return not _is_dead(line)
        try:
            line.expect("aborted", self._update, deadline)
        except PeerLostError:
            return False
        return True

    def _broke_off(self, error: Exception) -> NoReturn:
        """Take the update back and raise, naming whoever is gone.

        Raises:
            PeerLostError: some receiver is gone. Else ``error``.
        """
        lost = self._take_back(str(error))
        if not lost:
            raise error
        names = ", ".join(line.name for line in lost)
        raise PeerLostError(f"{names} is gone; the next update goes to those that are left") from error


def _is_dead(line: Connection) -> bool:
    """Whether the other end has hung up. What it said before is passed over."""
    try:
        while line.waiting():
            line.receive(time.monotonic())
    except PeerLostError:
        return True
    except TimeoutError:
        pass
    return False


# ---- receiving


class ReceiveEnd(Protocol):
    """A receiver's end of what buckets travel through."""

    def open(self, line: Connection, terms: Message) -> None:
        """Open it, while the trainer opens its own."""
        ...

    def take(self, turn: int, used: int) -> Tensor:
        """A bucket's bytes, uint8 ``[used]``, once they are there. To be read before the next is taken."""
        ...

    def release(self, line: Connection, update: int) -> None:
        """Say that the bucket has been read, where the trainer waits for that."""
        ...

    def drop(self) -> None:
        """Break everything off. The next ``open`` starts afresh."""
        ...


class PushReceiver:
    """A receiver's end: a :class:`areal.api.WeightReceiver`.

    An update is held whole, in the module's dtypes on ``staging``, until the trainer commits it.

    Args:
        line: to the trainer.
        end: gives the buckets.
        module: to be filled.
        timeout: seconds that the trainer may be silent in the middle of an update: at least what it takes to gather a bucket.
        staging: where an update is held.
        observe: told of each stage.
    """

    def __init__(
        self,
        line: Connection,
        end: ReceiveEnd,
        module: nn.Module,
        *,
        timeout: float,
        staging: torch.device | str = "cpu",
        observe: Observe = ignore,
    ) -> None:
        self._line, self._end, self._observe = line, end, observe
        self._replica, self._staging = Replica(module), torch.device(staging)
        self._timeout = timeout

    @property
    def version(self) -> int | None:
        return self._replica.version

    def pending(self) -> bool:
        return self._line.waiting()

    def receive(self, timeout: float | None = None) -> int:
        """As :meth:`areal.api.WeightReceiver.receive`. An update that the trainer takes back is none; the wait goes on."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                message = self._line.receive(deadline)
            except TimeoutError as error:
                raise TimeoutError(f"the trainer began no update within {timeout:g} s") from error
            except PeerLostError as error:
                raise self._without_trainer(error) from error
            if message["is"] == "update" and self._follow(message):
                return int(message["version"])

    def close(self) -> None:
        self._end.drop()
        self._line.close()

    def _follow(self, message: Message) -> bool:
        """Take one update. Returns whether it was committed."""
        update = _Update(message, self._line, self._end, self._replica, self._staging, self._observe)
        try:
            while not update.over:
                update.answer(self._line.receive(time.monotonic() + self._timeout))
        except (PeerLostError, TimeoutError) as error:
            self._end.drop()
            raise self._without_trainer(error) from error
        if update.fault is not None:
            raise update.fault
        return update.committed

    def _without_trainer(self, error: Exception) -> PeerLostError:
        serves = "no version was received" if self.version is None else f"version {self.version} serves"
        return PeerLostError(f"{error}; {serves}")


class _Update:
    """One update as it arrives. Its own faults wait until all receivers have everything, so that none is left alone with the carrier."""

    def __init__(
        self,
        message: Message,
        line: Connection,
        end: ReceiveEnd,
        replica: Replica,
        device: torch.device,
        observe: Observe,
    ) -> None:
        self._number, self._version = message["update"], int(message["version"])
        self._line, self._end, self._observe = line, end, observe
        self._staged = Staging(replica, complete=message["kind"] == "full", device=device)
        self._broken = self.over = self.committed = False
        self.fault: Exception | None = None
        self._reply("ready")

    def answer(self, message: Message) -> None:
        """Do what the trainer says."""
        if message["update"] != self._number:
            return
        match message["is"]:
            case "open":
                self._carry(lambda: self._end.open(self._line, message))
                if not self._broken:
                    self._reply("open")
            case "bucket":
                self._carry(lambda: self._take(message))
                self._observe("bucket")
            case "end":
                self._finish(message)
            case "commit":
                self._staged.commit(self._version)
                self.over = self.committed = True
                self._observe("committed")
                self._reply("done")
            case "abort":
                self.over = True
                self._end.drop()
                self._reply("aborted")

    def _carry(self, action: Callable[[], None]) -> None:
        """Use the carrier. What breaks it is told at once; the trainer then takes the update back."""
        if self._broken:
            return
        try:
            action()
        except (RuntimeError, OSError, EOFError) as error:
            self._broken = True
            self._end.drop()
            self._reply("broken", why=f"{type(error).__name__}: {error}")

    def _take(self, message: Message) -> None:
        data = self._end.take(message["turn"], message["used"])
        try:
            if self.fault is None:
                for piece in map(BucketSlice.from_json, message["pieces"]):
                    self._staged.put(piece, piece.of(data))
        except (ValueError, RuntimeError) as error:
            self.fault = error
        self._end.release(self._line, self._number)

    def _finish(self, message: Message) -> None:
        try:
            if self.fault is None:
                self._staged.check()
                if self._staged.n_tensors != message["n_tensors"]:
                    raise RuntimeError(
                        f"{self._staged.n_tensors} tensors arrived, and the trainer sent {message['n_tensors']}"
                    )
        except (ValueError, RuntimeError) as error:
            self.fault = error
        self._observe("staged")
        if self.fault is None:
            self._reply("staged")
        else:
            self._reply("staged", fault=str(self.fault), value=isinstance(self.fault, ValueError))

    def _reply(self, what: str, **more: Any) -> None:
        self._line.send({"is": what, "update": self._number, **more})
