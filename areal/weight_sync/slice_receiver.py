"""Receive the slices of :class:`~areal.weight_sync.slice_transport.SliceTransport`, and write them into a module."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal.api.weights import LocalTensor, NamedTensor
from areal.weight_sync.apply import Replica, Staging
from areal.weight_sync.chain import Chain, chain_rank

_NO_LIMIT = timedelta(days=365)


class SliceReceiver:
    """Implements :class:`~areal.api.WeightReceiver` for slices from all ranks of a trainer.

    An update is staged until the trainer commits it, which needs the memory of the weights a second time, on ``staging``.

    Args:
        module: module to update, as in :class:`~areal.weight_sync.apply.Replica`.
        port: port of the transport.
        index: number of this receiver, from 0.
        address: host name of the trainer's first rank.
        staging: device of the staged update.
        timeout: seconds for all to join, and for each message.

    Raises:
        ValueError: the trainer has another number of receivers.
        RuntimeError: the trainer cannot be reached.
    """

    def __init__(
        self,
        module: nn.Module,
        port: int,
        index: int,
        *,
        address: str = "127.0.0.1",
        staging: torch.device | str = "cpu",
        timeout: float = 120.0,
    ) -> None:
        self._replica, self._index, self._device = Replica(module), index, torch.device(staging)
        self._seconds = timeout
        self._store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
        self._trainers, self._receivers = json.loads(self._store.get("sizes"))
        if not 0 <= index < self._receivers:
            raise ValueError(
                f"index = {index}: the trainer has {self._receivers} receivers; give 0 to {self._receivers - 1}"
            )
        self._chains: list[Chain] = []
        self._number = 1

    @property
    def version(self) -> int | None:
        """Version of the weights in the module; ``None`` before the first update."""
        return self._replica.version

    @property
    def sent_bytes(self) -> int:
        """Bytes that were passed on to other receivers."""
        return sum(chain.sent_bytes for chain in self._chains)

    def pending(self) -> bool:
        """Return True if an update has begun."""
        return bool(self._store.check([f"{self._number}/begin"]))

    def receive(self, timeout: float | None = None) -> int:
        """Wait for the next update and write it into the module; see :meth:`areal.api.WeightReceiver.receive`."""
        begin = f"{self._number}/begin"
        try:
            self._store.wait([begin], _NO_LIMIT if timeout is None else timedelta(seconds=timeout))
        except dist.DistStoreError as error:
            raise TimeoutError(f"no update began within {timeout} s") from error
        version, kind = json.loads(self._store.get(begin))
        number, self._number = self._number, self._number + 1
        # In the order of the ranks: each waits for all receivers.
        if not self._chains:
            self._chains = [
                Chain(
                    self._store,
                    f"chain-{rank}",
                    chain_rank(self._index, rank, self._receivers),
                    1 + self._receivers,
                    self._seconds,
                )
                for rank in range(self._trainers)
            ]
        staging = _SliceStaging(self._replica, Staging(self._replica, complete=kind == "full", device=self._device))
        # All chains at once, because the ranks send at once.
        with ThreadPoolExecutor(self._trainers, "weight-slices") as pool:
            complete = all(list(pool.map(lambda chain: _receive_all(chain, staging.put), self._chains)))
        if complete:
            self._store.set(f"{number}/checked/{self._index}", staging.check())
        why = self._store.get(f"{number}/end").decode()
        if why:
            raise (ValueError if staging.fault else RuntimeError)(f"version {version} was aborted: {why}")
        staging.commit(version)
        return int(version)

    def close(self) -> None:
        """Close the connections. The module keeps its weights. May be called twice."""
        self._chains = []


def _receive_all(chain: Chain, put: Callable[[LocalTensor], None]) -> bool:
    """Pass the slices of one update to ``put``. Returns whether it is complete."""
    while not isinstance(slices := chain.receive(), bool):
        for each in slices:
            put(each)
    return slices


class _SliceStaging:
    """Puts slices together, from several threads. The first error is kept, because all slices must be received and passed on.

    Attributes:
        fault: the first error; empty without one.
    """

    def __init__(self, replica: Replica, staging: Staging) -> None:
        self._replica, self._staging = replica, staging
        self._lock = threading.Lock()
        self._full: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}  # elements that have not arrived, by name
        self.fault = ""

    def put(self, part: LocalTensor) -> None:
        """Store a slice. A full tensor moves to the staged update."""
        with self._lock:
            try:
                if part.name not in self._full:
                    self._replica.resolve(part.name, part.shape)
                    self._full[part.name] = torch.empty(part.shape, dtype=part.tensor.dtype)
                    self._missing[part.name] = self._full[part.name].numel()
                self._full[part.name][part.box] = part.tensor
                self._missing[part.name] -= part.tensor.numel()
                if not self._missing[part.name]:
                    self._staging.put(NamedTensor(part.name, self._full.pop(part.name)))
            except ValueError as error:
                self.fault = self.fault or str(error)

    def check(self) -> str:
        """Return the first error, also of tensors that have not arrived; empty if the update can be used."""
        if not self.fault and self._full:
            name = next(iter(self._full))
            self.fault = f"{name}: {abs(self._missing[name])} of {self._full[name].numel()} elements did not arrive"
        try:
            self._staging.check()
        except ValueError as error:
            self.fault = self.fault or str(error)
        return self.fault

    def commit(self, version: int) -> None:
        self._staging.commit(version)
