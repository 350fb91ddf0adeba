"""One update of weights in three steps that all ranks of the trainer agree on: prepare, transfer, commit."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import nn

from areal.api.control import Control
from areal.api.weights import NamedTensor, SelectName, TensorSource, UpdateKind, WeightUpdateMeta, stream_of
from areal.weight_sync.apply import Replica, Staging

_T = TypeVar("_T")


class OutgoingTensors:
    """The tensors of a source that are sent, selected, cast and counted. Can be iterated once.

    Args:
        stream: tensors of the source.
        version: version of the update.
        select: predicate of names; ``None`` selects all.
        cast: dtype for floating-point tensors; ``None`` keeps each dtype.
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
            tensor = tensor.to(sent_dtype(tensor, self._cast))
            self._n_tensors += 1
            self._nbytes += tensor.nbytes
            yield NamedTensor(name, tensor)
        if not self._n_tensors:
            raise ValueError("no tensor was selected: select is called with Hugging Face names, and said no to all")

    @property
    def meta(self) -> WeightUpdateMeta:
        """Description of the tensors sent so far; final after the iteration."""
        return WeightUpdateMeta(self._version, _kind(self._select), self._n_tensors, self._nbytes)


def sent_dtype(tensor: torch.Tensor, cast: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is sent: ``cast``, if there is one, but integers and booleans keep theirs."""
    return cast if cast is not None and tensor.is_floating_point() else tensor.dtype


class Sender(Protocol):
    """Work of one rank in an update before and after the transfer."""

    def prepare(self, version: int, kind: UpdateKind) -> None:
        """Check that the update can be sent, before any tensor is gathered."""
        ...

    def commit(self, meta: WeightUpdateMeta) -> None:
        """Let the receivers use the update."""
        ...

    def abort(self, why: str) -> None:
        """Abort an uncommitted update. Must not raise."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class TensorSender(Sender, Protocol):
    """Work of one rank in an update of full tensors."""

    def transfer(self, tensors: OutgoingTensors) -> None:
        """Iterate to the end and send everything to the receivers, which do not use it yet."""
        ...


class Transport(ABC):
    """Sends updates. Every rank of the trainer has one and calls :meth:`send`.

    Args:
        control: control plane over all ranks of the trainer (``engine.control``).
        sender: sender of this rank, or ``None``.
        cast: dtype in which floating-point tensors are sent, e.g. the rollout's bfloat16; ``None`` keeps each
            dtype. All ranks pass the same: an engine's shards are cast before they are gathered. If a replica stores some
            weights in a wider dtype, leave it ``None``: receivers cast to the dtype of each weight.
    """

    unsent_note = "version {version} was not sent; receivers keep what they have"
    """Added to an error before the commit."""
    commit_note = "version {version} was sent; it serves wherever it arrived"
    """Added to an error of the commit."""

    def __init__(self, control: Control, sender: Sender | None, *, cast: torch.dtype | None = None) -> None:
        self._control, self._sender, self._cast = control, sender, cast

    def send(self, source: TensorSource, version: int, *, select: SelectName | None = None) -> WeightUpdateMeta:
        """Implement :meth:`areal.api.WeightTransport.send`."""
        WeightUpdateMeta(version, _kind(select), 0, 0)  # validates the version
        note = self.unsent_note.format(version=version)
        # Step 1, prepare: fails before the expensive part.
        self._prepare(version, _kind(select), note)
        # Steps 2 and 3: after a failed transfer no receiver has changed, after a failed commit some may have.
        sent = self._stream(source, version, select, note)
        return self._commit(sent, version)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    @abstractmethod
    def _stream(
        self, source: TensorSource, version: int, select: SelectName | None, note: str
    ) -> WeightUpdateMeta | None:
        """Send all tensors. Collective. Returns their description on a rank that sends. An error is raised on all ranks, and has the note."""

    def _commit(self, meta: WeightUpdateMeta | None, version: int) -> WeightUpdateMeta:
        def commit() -> WeightUpdateMeta | None:
            if self._sender is not None and meta is not None:
                self._sender.commit(meta)
            return meta

        note = self.commit_note.format(version=version)
        return next(meta for meta in self._control.attempt_and_gather(commit, note) if meta is not None)

    def _prepare(self, version: int, kind: UpdateKind, note: str) -> None:
        def prepare() -> torch.dtype | None:
            if self._sender is not None:
                self._sender.prepare(version, kind)
            return self._cast

        with self._aborting_on_error():
            casts = self._control.attempt_and_gather(prepare, note)
            # Shards of several dtypes cannot be gathered.
            if len(set(casts)) > 1:
                raise ValueError(f"cast = {casts} on the ranks of the trainer: pass the same dtype on all; {note}")

    def _attempt(self, fn: Callable[[], _T], note: str) -> _T:
        """Call ``fn``. An error on any rank aborts the update, and raises on every rank."""
        with self._aborting_on_error():
            return self._control.attempt(fn, note)

    @contextlib.contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """Abort the update on an error of any rank, or an interrupt: this rank must not leave its receivers waiting."""
        try:
            yield
        except BaseException as failure:
            if self._sender is not None:
                self._sender.abort(str(failure) or type(failure).__name__)
            raise


class TensorTransport(Transport):
    """Sends full tensors, which all ranks gather. Ranks with a ``sender`` send them.

    An error of the sending rank is raised only after all ranks have iterated to the end, so that no rank is left waiting in a collective of
    the source.
    """

    def __init__(self, control: Control, sender: TensorSender | None, *, cast: torch.dtype | None = None) -> None:
        super().__init__(control, sender, cast=cast)
        self._sends = sender

    def _stream(
        self, source: TensorSource, version: int, select: SelectName | None, note: str
    ) -> WeightUpdateMeta | None:
        def stream() -> WeightUpdateMeta | None:
            tensors, outgoing = stream_of(source, self._cast), None
            if self._sends is not None:
                outgoing = OutgoingTensors(tensors, version, select, self._cast)
                try:
                    self._sends.transfer(outgoing)
                except Exception:
                    # The other ranks are in the collectives of the source: iterate to the end with them, then raise.
                    with contextlib.suppress(Exception):
                        _iterate_to_end(tensors)
                    raise
            _iterate_to_end(tensors)
            return None if outgoing is None else outgoing.meta

        return self._attempt(stream, note)


def _iterate_to_end(tensors: Iterator[NamedTensor]) -> None:
    for _ in tensors:
        pass


def _kind(select: SelectName | None) -> UpdateKind:
    return "full" if select is None else "selected"


class DirectTransport(TensorTransport):
    """Copies weights into a module of the same process. Ranks may have a module each, or none.

    The update is staged until every rank has received it, which needs the memory of the module's weights a second
    time, on ``staging``. An error therefore leaves the module unchanged.

    Args:
        control: control plane over all ranks of the trainer.
        module: module to update, as in :class:`~areal.weight_sync.apply.Replica`.
        staging: device of the staged update.
    """

    def __init__(self, control: Control, module: nn.Module | None, *, staging: torch.device | str = "cpu") -> None:
        self.replica = None if module is None else Replica(module)
        sender = None if self.replica is None else _DirectSender(self.replica, torch.device(staging))
        super().__init__(control, sender)

    @property
    def version(self) -> int | None:
        """Version of the weights in this rank's module; ``None`` before the first update or without a module."""
        return None if self.replica is None else self.replica.version


class _DirectSender:
    """Implements :class:`TensorSender` by copies within the process."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        self._replica, self._device = replica, device
        self._staging: Staging | None = None

    def prepare(self, version: int, kind: UpdateKind) -> None:
        self._staging = Staging(self._replica, complete=kind == "full", device=self._device)

    def transfer(self, tensors: OutgoingTensors) -> None:
        staging = self._require_staging()
        for named in tensors:
            staging.put(named)
        staging.check()

    def commit(self, meta: WeightUpdateMeta) -> None:
        self._require_staging().commit(meta.version)
        self._staging = None

    def abort(self, why: str) -> None:
        self._staging = None

    def close(self) -> None:
        self._staging = None

    def _require_staging(self) -> Staging:
        if self._staging is None:
            raise RuntimeError("no update was prepared")
        return self._staging


def ignore_errors(action: Callable[[], object]) -> None:
    """Call a clean-up function after an error and suppress its own errors, which would hide the first one."""
    with contextlib.suppress(OSError, RuntimeError, EOFError, ValueError):
        action()
