"""Tensors between the device and host memory, or files, bit for bit."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostMemory:
    """Copies storages to host memory and frees them in place, so that every view of them stays valid once they are back.

    Args:
        tensors: what there is to move, under ``"params"``, ``"grads"`` and ``"optimizer"``.
        folder: where they go to files of this rank instead, which are removed when they are back or nobody wants them any more.

    Raises:
        ValueError: there is no such folder, or it cannot be written to.
    """

    def __init__(self, tensors: Mapping[str, Callable[[], Iterable[Tensor]]], folder: str | None = None) -> None:
        self._tensors = tensors
        self._away: dict[str, list[tuple[torch.UntypedStorage, _Away]]] = {}
        self._folder: Path | None = None
        if folder is not None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="offload-", dir=folder))
            except OSError as error:
                raise ValueError(
                    f"offload_dir = {folder!r}: {error}; name a directory that can be written to"
                ) from error
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Move what is named; what is away already stays there."""
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted and kind not in self._away:
                self._away[kind] = [self._send(storage) for storage in _storages(self._tensors[kind]())]

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Bring back what is named; what is here already stays. Returns the bytes that came."""
        nbytes = 0
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted:
                for storage, away in self._away.pop(kind, []):
                    away.bring_back(storage)
                    nbytes += storage.nbytes()
        return nbytes

    def forget(self, kind: str) -> None:
        """Leave what is away where it is: nobody will want it back."""
        self._away.pop(kind, None)

    def _send(self, storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, _Away]:
        away = _Copy(storage) if self._folder is None else _File(storage, self._folder)
        storage.resize_(0)
        return storage, away


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The state of a torch optimizer, but for scalars."""
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    local = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    unique = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in local if x.untyped_storage().nbytes()}
    return list(unique.values())


class _Away(Protocol):
    def bring_back(self, storage: torch.UntypedStorage) -> None: ...


class _Copy:
    """Bytes in host memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._bytes = storage.cpu() if storage.device.type != "cpu" else storage.clone()

    def bring_back(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(self._bytes.nbytes())
        storage.copy_(self._bytes)


class _File:
    """Bytes in a file, which is mapped only while they move, so that they are not in this process's memory meanwhile."""

    def __init__(self, storage: torch.UntypedStorage, folder: Path) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            self._path = file.name
        self._nbytes = storage.nbytes()
        self._mapped().copy_(storage)

    def bring_back(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(self._nbytes)
        storage.copy_(self._mapped())

    def _mapped(self) -> Any:
        return torch.UntypedStorage.from_file(self._path, shared=True, nbytes=self._nbytes)

    def __del__(self) -> None:
        Path(self._path).unlink(missing_ok=True)
