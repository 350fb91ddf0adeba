"""One update of weights, in three steps that all ranks of the trainer agree on: prepare, bring, commit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import nn

from areal.api.weights import NamedTensor, SelectName, TensorSource, UpdateKind, WeightUpdateMeta
from areal.utils.distributed import ControlPlane
from areal.weight_sync.apply import Replica, Staging

_T = TypeVar("_T")


class Outgoing:
    """The tensors of a source that are to be sent, in the dtype in which they are to be: iterated once, and counted.

    Args:
        stream: of the source.
        cast: dtype for floating-point tensors; ``None`` sends each as it is.
    """

    def __init__(
        self, stream: Iterator[NamedTensor], version: int, select: SelectName | None, cast: torch.dtype | None
    ) -> None:
        self._stream, self._version, self._select, self._cast = stream, version, select, cast
        self._n_tensors = self._nbytes = 0

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._stream:
            if self._select is not None and not self._select(name):
                continue
            if self._cast is not None and tensor.is_floating_point():
                tensor = tensor.to(self._cast)
            self._n_tensors += 1
            self._nbytes += tensor.nbytes
            yield NamedTensor(name, tensor)
        if not self._n_tensors:
            raise ValueError("no tensor was selected: select is called with Hugging Face names, and said no to all")

    @property
    def meta(self) -> WeightUpdateMeta:
        """What has been sent; final once the iteration has ended."""
        return WeightUpdateMeta(self._version, _kind(self._select), self._n_tensors, self._nbytes)


class Sender(Protocol):
    """What one rank does of an update: the way that the weights take."""

    def prepare(self, version: int, kind: UpdateKind) -> None:
        """See that the update can be sent, before anything is streamed."""
        ...

    def bring(self, tensors: Outgoing) -> None:
        """Iterate to the end, and bring everything to where receivers can take it, without any of it being used yet."""
        ...

    def commit(self, meta: WeightUpdateMeta) -> None:
        """Let receivers use it."""
        ...

    def abort(self, why: str) -> None:
        """Take an uncommitted update back. Does not raise."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Transport:
    """Sends updates. Every rank of the trainer has one, and all call :meth:`send` together; those with a ``sender`` do the sending.

    Args:
        control: over all ranks of the trainer (``engine.control``).
        sender: of this rank, if it has any.
        cast: dtype in which floating-point tensors are sent, such as the rollout's bfloat16; ``None`` sends each in its own. Where a replica
            keeps some weights wider than the rest, leave it ``None``: receivers cast to what each weight has there.
    """

    def __init__(self, control: ControlPlane, sender: Sender | None, *, cast: torch.dtype | None = None) -> None:
        self._control, self._sender, self._cast = control, sender, cast

    def send(self, source: TensorSource, version: int, *, select: SelectName | None = None) -> WeightUpdateMeta:
        """As :meth:`areal.api.WeightTransport.send`. A fault of the sending rank waits until all ranks have iterated to the end, so
        that none is left alone in a collective of the source.
        """
        WeightUpdateMeta(version, _kind(select), 0, 0)  # says what is wrong with the version
        note = f"version {version} was not sent; receivers keep what they have"
        self._together(lambda sender: sender.prepare(version, _kind(select)), note)
        outgoing = self._stream(source, version, select, note)
        return self._commit(outgoing, version)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _stream(self, source: TensorSource, version: int, select: SelectName | None, note: str) -> Outgoing | None:
        def stream() -> Outgoing | None:
            tensors, outgoing = source.named_tensors(), None
            if self._sender is not None:
                outgoing = Outgoing(tensors, version, select, self._cast)
                try:
                    self._sender.bring(outgoing)
                except Exception:
                    # The other ranks are in the collectives of the source: iterate to the end with them, then raise.
                    with contextlib.suppress(Exception):
                        _iterate_to_end(tensors)
                    raise
            _iterate_to_end(tensors)
            return outgoing

        return self._attempt(stream, note)

    def _commit(self, outgoing: Outgoing | None, version: int) -> WeightUpdateMeta:
        def commit() -> WeightUpdateMeta | None:
            meta = None if outgoing is None else outgoing.meta
            if self._sender is not None and meta is not None:
                self._sender.commit(meta)
            return meta

        note = f"version {version} was sent; it serves wherever it arrived"
        return next(meta for meta in self._control.attempt_and_gather(commit, note) if meta is not None)

    def _together(self, action: Callable[[Sender], None], note: str) -> None:
        def act() -> None:
            if self._sender is not None:
                action(self._sender)

        self._attempt(act, note)

    def _attempt(self, fn: Callable[[], _T], note: str) -> _T:
        """Call ``fn``. An error on any rank aborts the update, and raises on every rank."""
        try:
            return self._control.attempt(fn, note)
        except Exception as failure:
            if self._sender is not None:
                self._sender.abort(str(failure))
            raise


def _iterate_to_end(tensors: Iterator[NamedTensor]) -> None:
    for _ in tensors:
        pass


def _kind(select: SelectName | None) -> UpdateKind:
    return "full" if select is None else "selected"


class DirectTransport(Transport):
    """Copies weights into a module of this process. Each rank may have a module, or none.

    The update is held whole beside the module until every rank has all of it: once more the memory of the module's weights, on ``staging``.
    A fault therefore leaves the module as it was.

    Args:
        control: over all ranks of the trainer.
        module: to be filled, as for :class:`~areal.weight_sync.apply.Replica`.
        staging: where the update is held.
    """

    def __init__(self, control: ControlPlane, module: nn.Module | None, *, staging: torch.device | str = "cpu") -> None:
        self.replica = None if module is None else Replica(module)
        sender = None if self.replica is None else _DirectSender(self.replica, torch.device(staging))
        super().__init__(control, sender)

    @property
    def version(self) -> int | None:
        """Of the weights in this rank's module; ``None`` before the first update, or without module."""
        return None if self.replica is None else self.replica.version


class _DirectSender:
    def __init__(self, replica: Replica, device: torch.device) -> None:
        self._replica, self._device = replica, device
        self._staging: Staging | None = None

    def prepare(self, version: int, kind: UpdateKind) -> None:
        self._staging = Staging(self._replica, complete=kind == "full", device=self._device)

    def bring(self, tensors: Outgoing) -> None:
        staging = self._required()
        for named in tensors:
            staging.put_whole(named)
        staging.check()

    def commit(self, meta: WeightUpdateMeta) -> None:
        self._required().commit(meta.version)
        self._staging = None

    def abort(self, why: str) -> None:
        self._staging = None

    def close(self) -> None:
        self._staging = None

    def _required(self) -> Staging:
        if self._staging is None:
            raise RuntimeError("no update was prepared")
        return self._staging


def quietly(action: Callable[[], object]) -> None:
    """Call something on the way out of a fault, whose own faults add nothing."""
    with contextlib.suppress(OSError, RuntimeError, EOFError, ValueError):
        action()
