"""Offload tensors to host memory or files, and restore them bit for bit."""

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
    """Moves tensors to host memory or files, by freeing and restoring their storages in place.

    Views of an offloaded storage stay valid: they have their values again after :meth:`onload`.

    Args:
        tensors: functions that return the tensors of ``"params"``, ``"grads"`` and ``"optimizer"``.
        folder: directory for files of this rank, instead of host memory. Files are removed after they are restored or
            discarded.

    Raises:
        ValueError: the directory does not exist or is not writable.
    """

    def __init__(self, tensors: Mapping[str, Callable[[], Iterable[Tensor]]], folder: str | None = None) -> None:
        self._tensors = tensors
        self._backups: dict[str, list[tuple[torch.UntypedStorage, _Backup]]] = {}
        self._folder: Path | None = None
        if folder is not None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="offload-", dir=folder))
            except OSError as error:
                raise ValueError(
                    f"offload_dir = {folder!r}: {error}; name a directory that can be written to"
                ) from error
            # Also removed if this object is never closed.
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Move the named kinds of tensors out. Kinds that are offloaded already are left as they are."""
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted and kind not in self._backups:
                self._backups[kind] = [self._move_out(storage) for storage in _storages(self._tensors[kind]())]

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Restore the named kinds of tensors that are offloaded. Returns the number of bytes moved."""
        nbytes = 0
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted:
                for storage, backup in self._backups.pop(kind, []):
                    backup.restore(storage)
                    nbytes += storage.nbytes()
        return nbytes

    def forget(self, kind: str) -> None:
        """Discard the offloaded values of a kind. They cannot be restored."""
        self._backups.pop(kind, None)

    def _move_out(self, storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, _Backup]:
        backup = _HostBackup(storage) if self._folder is None else _FileBackup(storage, self._folder)
        storage.resize_(0)  # frees the memory and keeps the storage object, which all views refer to
        return storage, backup


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the state tensors of a torch optimizer, except scalars."""
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, without those that are empty (offloaded)."""
    local = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    unique = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in local if x.untyped_storage().nbytes()}
    return list(unique.values())


class _Backup(Protocol):
    """Bytes of one offloaded storage."""

    def restore(self, storage: torch.UntypedStorage) -> None: ...


class _HostBackup:
    """Backup in host memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._bytes = storage.cpu() if storage.device.type != "cpu" else storage.clone()

    def restore(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(self._bytes.nbytes())
        storage.copy_(self._bytes)


class _FileBackup:
    """Backup in a file. The file is memory-mapped only during copies, so that it takes no memory of the process."""

    def __init__(self, storage: torch.UntypedStorage, folder: Path) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            self._path = file.name
        self._nbytes = storage.nbytes()
        self._mapped().copy_(storage)

    def restore(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(self._nbytes)
        storage.copy_(self._mapped())

    def _mapped(self) -> Any:
        return torch.UntypedStorage.from_file(self._path, shared=True, nbytes=self._nbytes)

    def __del__(self) -> None:
        Path(self._path).unlink(missing_ok=True)
