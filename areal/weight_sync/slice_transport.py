"""Send each trainer rank's slices of the weights to all receivers, without a gather."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from areal.api.control import Control
from areal.api.weights import LocalTensor, SelectName, TensorSource, UpdateKind, WeightUpdateMeta
from areal.weight_sync.chain import Chain, box_numbers
from areal.weight_sync.transport import Transport, ignore_errors, sent_dtype

CHUNK_BYTES = 64 * 2**20
"""Size from which slices are sent together."""


class SliceTransport(Transport):
    """Sends the slices that each trainer rank has to :class:`~areal.weight_sync.slice_receiver.SliceReceiver`, over gloo.

    Each rank sends ``1 / control.size`` of the model's bytes once; the receivers pass them on. Nothing is gathered. A slice that several ranks
    have is divided among them. The first update waits until all receivers have joined.

    After an error of the network, receivers keep their version, and further updates are refused: make another transport and other receivers.

    Args:
        control: control plane over all ranks of the trainer.
        receivers: number of receivers.
        address: host name of the trainer's first rank, as ranks and receivers see it.
        port: port of the first rank at which all meet; 0 chooses one.
        cast: dtype in which floating-point tensors are sent.
        timeout: seconds for all to join, for each message, and for the receivers to check an update.

    Attributes:
        port: port for the receivers, on all ranks.
        sent_bytes: bytes that this rank has sent.

    Raises:
        ValueError: ``receivers`` is below 1, or ``timeout`` is not above 0.
    """

    def __init__(
        self,
        control: Control,
        receivers: int,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        cast: torch.dtype | None = None,
        timeout: float = 120.0,
    ) -> None:
        if receivers < 1:
            raise ValueError(f"receivers = {receivers}: give at least 1")
        if not timeout > 0:
            raise ValueError(f"timeout = {timeout}: it must be above 0 seconds")

        def serve() -> dist.TCPStore | None:
            if control.rank:
                return None
            return dist.TCPStore(address, port, is_master=True, wait_for_workers=False)

        # The first rank has the store.
        store = control.attempt(serve)
        self.port: int = control.gather(None if store is None else store.port)[0]
        store = store or dist.TCPStore(address, self.port, is_master=False)
        store.set_timeout(timedelta(seconds=timeout))
        if control.rank == 0:
            store.set("sizes", json.dumps([control.size, receivers]))
        self._slices = _SliceSender(store, control.rank, receivers, timeout)
        self._source: Any = None
        self._divisions: dict[_Key, tuple[int, int]] = {}
        super().__init__(control, self._slices, cast=cast)

    @property
    def sent_bytes(self) -> int:
        return self._slices.sent_bytes

    def _stream(self, source: TensorSource, version: int, select: SelectName | None, note: str) -> WeightUpdateMeta:
        self._divide(source, note)
        with self._aborting_on_error():
            sent = self._control.attempt_and_gather(lambda: self._slices.send(self._own_slices(source, select)), note)
            self._control.attempt(self._slices.check_receivers, note)
            names = set[str]().union(*(names for names, _ in sent))
            if not names:
                raise ValueError("no tensor was selected: select is called with Hugging Face names, and said no to all")
        kind: UpdateKind = "full" if select is None else "selected"
        return WeightUpdateMeta(version, kind, len(names), sum(nbytes for _, nbytes in sent))

    def _divide(self, source: Any, note: str) -> None:
        """Find, for each slice of this rank, its index among the ranks that have the same one, and their number. Collective."""
        if self._source is source:
            return

        def keys() -> list[_Key]:
            if not hasattr(source, "local_tensors"):
                raise ValueError(
                    f"a {type(source).__name__} has no slices (local_tensors): send an engine, or use DirectTransport or DiskTransport"
                )
            return [_key(part.name, part.box) for part in source.local_tensors()]

        with self._aborting_on_error():
            by_rank = self._control.attempt_and_gather(keys, note)
        holders: dict[_Key, list[int]] = {}
        for rank, found in enumerate(by_rank):
            for key in found:
                holders.setdefault(key, []).append(rank)
        rank = self._control.rank
        self._divisions = {key: (holders[key].index(rank), len(holders[key])) for key in by_rank[rank]}
        self._source = source

    def _own_slices(self, source: Any, select: SelectName | None) -> Iterator[LocalTensor]:
        """Yield what this rank sends: its slices, and of those that other ranks have too, some of the rows."""
        for name, tensor, box, shape in source.local_tensors(select=select):
            index, count = self._divisions[_key(name, box)]
            if box:
                first, last = index * len(tensor) // count, (index + 1) * len(tensor) // count
                start, step = box[0].start, box[0].step or 1
                tensor, box = tensor[first:last], (slice(start + first * step, start + last * step, step), *box[1:])
            elif index:
                continue
            if tensor.numel():
                yield LocalTensor(name, tensor.detach().to("cpu", sent_dtype(tensor, self._cast)), box, shape)


_Key = tuple[str, tuple[tuple[int, int, int], ...]]
"""Name and box of a slice."""


def _key(name: str, box: tuple[slice, ...]) -> _Key:
    return name, box_numbers(box)


class _SliceSender:
    """Implements :class:`~areal.weight_sync.transport.Sender` on one chain per rank, and a store for small messages.

    Keys of the store: ``sizes``, and for each update ``N/begin``, ``N/checked/RECEIVER`` and ``N/end``.
    """

    def __init__(self, store: dist.Store, rank: int, receivers: int, seconds: float) -> None:
        self._store, self._rank, self._receivers, self._seconds = store, rank, receivers, seconds
        self._chain: Chain | None = None
        self._number = 0
        self._begun = self._streaming = self._broken = False

    @property
    def sent_bytes(self) -> int:
        return 0 if self._chain is None else self._chain.sent_bytes

    def prepare(self, version: int, kind: UpdateKind) -> None:
        if self._broken:
            raise RuntimeError(
                "an earlier update lost a receiver or a rank: make another transport and other receivers"
            )
        self._number, self._begun = self._number + 1, True
        if self._rank == 0:
            self._store.set(f"{self._number}/begin", json.dumps([version, kind]))
        if self._chain is None:
            self._join()
        self._streaming = True

    def _join(self) -> None:
        """Wait for the receivers. Without one of them nothing can be sent later: those that come find the addresses of this attempt."""
        self._broken = True
        try:
            self._chain = Chain(self._store, f"chain-{self._rank}", 0, 1 + self._receivers, self._seconds)
        except RuntimeError as error:
            raise RuntimeError(
                f"not all of {self._receivers} receivers joined within {self._seconds:g} s: make another transport and other receivers: {error}"
            ) from error
        self._broken = False

    def send(self, slices: Iterator[LocalTensor]) -> tuple[set[str], int]:
        """Send slices to the end. Returns their names and their bytes."""
        names, total = set[str](), 0
        chunk: list[LocalTensor] = []
        size = 0
        for each in slices:
            chunk.append(each)
            names.add(each.name)
            size += each.tensor.nbytes
            if size >= CHUNK_BYTES:
                self._send(chunk)
                total, size, chunk = total + size, 0, []
        if chunk:
            self._send(chunk)
        self._end(complete=True)
        return names, total + size

    def check_receivers(self) -> None:
        """Wait until the receivers have staged the update.

        Raises:
            ValueError: it does not fit a receiver.
            RuntimeError: a receiver does not answer.
        """
        if self._rank:
            return
        for receiver in range(self._receivers):
            fault = self._store.get(f"{self._number}/checked/{receiver}").decode()
            if fault:
                raise ValueError(f"receiver {receiver}: {fault}")

    def commit(self, meta: WeightUpdateMeta) -> None:
        self._begun = False
        if self._rank == 0:
            self._store.set(f"{self._number}/end", "")

    def abort(self, why: str) -> None:
        if self._streaming and not self._broken:
            with contextlib.suppress(RuntimeError):
                self._end(complete=False)
        if self._begun and self._rank == 0:
            ignore_errors(lambda: self._store.set(f"{self._number}/end", why))
        self._begun = False

    def close(self) -> None:
        # Closes the connections, so that receivers do not wait.
        self._chain, self._broken = None, True

    def _send(self, chunk: list[LocalTensor]) -> None:
        with self._breaking():
            self._require_chain().send(chunk)

    def _end(self, *, complete: bool) -> None:
        self._streaming = False
        with self._breaking():
            self._require_chain().end(complete=complete)

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Refuse further updates after an error of the network, which leaves messages half sent."""
        try:
            yield
        except RuntimeError as error:
            self._broken, self._chain = True, None
            raise RuntimeError(f"rank {self._rank} cannot send its slices; a receiver is lost: {error}") from error

    def _require_chain(self) -> Chain:
        if self._chain is None:
            raise RuntimeError("no update was prepared")
        return self._chain
