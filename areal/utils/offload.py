"""Offload tensors to host memory or files, and restore them bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.api.memory import EngineMemory, KindMemory
from areal.utils import platform
from areal.utils.bf16_adamw import BFloat16AdamW
from areal.utils.data.padding import round_up
from areal.utils.dtensor import local_part

_BLOCK_BYTES = 128 * 2**20
"""Size of a block of host memory: a power of two, because torch rounds pinned allocations up to one."""

_ALIGNMENT = 512
"""A copy begins at a multiple of this many bytes in its block."""


class HostMemory:
    """Moves tensors to host memory or files, by freeing and restoring their storages in place.

    Views of an offloaded storage stay valid: they have their values again after :meth:`onload`. Host memory is pinned if the
    tensors are on a GPU, and kept for the next :meth:`offload`.

    Args:
        tensors: functions that return the tensors of ``"params"``, ``"grads"`` and ``"optimizer"``.
        folder: directory for files of this rank, instead of host memory. Files are removed after they are restored or
            discarded.
        expected: functions that return the bytes of these kinds once all of their tensors exist. By default they exist.

    Raises:
        ValueError: the directory does not exist or is not writable.
    """

    def __init__(
        self,
        tensors: Mapping[str, Callable[[], Iterable[Tensor]]],
        folder: str | None = None,
        expected: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        self._tensors, self._expected = tensors, expected or {}
        self._backups: dict[str, list[tuple[torch.UntypedStorage, _Backup]]] = {}
        self._blocks: dict[str, _HostBlocks] = defaultdict(_HostBlocks)
        self._folder = None if folder is None else backup_folder(self, folder)

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Move the named kinds of tensors out. Kinds that are offloaded already are left as they are.

        Returns:
            Number of bytes that were freed.
        """
        # Enqueue the copies of all kinds. After an error here, everything is still on the device.
        backups: dict[str, list[tuple[torch.UntypedStorage, _Backup]]] = {}
        storages: list[torch.UntypedStorage] = []
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted and kind not in self._backups:
                backups[kind] = self._copy_out(kind, but=storages)
                storages += [storage for storage, _ in backups[kind]]
        # Wait for the copies once, then free the memory.
        _synchronize(storages)
        self._backups |= backups
        nbytes = sum(storage.nbytes() for storage in storages)
        for storage in storages:
            storage.resize_(0)  # keeps the storage object, which all views refer to
        return nbytes

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Restore the named kinds of tensors that are offloaded. Returns the number of bytes moved."""
        kinds = [kind for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)) if wanted]
        moved = [pair for kind in kinds for pair in self._backups.get(kind, [])]
        for storage, backup in moved:
            backup.restore(storage)
        # Wait for the copies once: after this, the host memory may be overwritten.
        storages = [storage for storage, _ in moved]
        _synchronize(storages)
        for kind in kinds:
            self.forget(kind)
        return sum(storage.nbytes() for storage in storages)

    def forget(self, kind: str) -> None:
        """Discard the offloaded values of a kind. They cannot be restored."""
        self._backups.pop(kind, None)

    def report(self, device: torch.device) -> EngineMemory:
        """Return the bytes of each kind, on ``device`` and elsewhere. A storage that several kinds have counts once."""
        counted: set[int] = set()
        kinds: dict[str, KindMemory] = {}
        for kind, tensors in self._tensors.items():
            storages = [x for x in _storages(tensors()) if x.data_ptr() not in counted]
            counted |= {storage.data_ptr() for storage in storages}
            # With cpu_offload, shards stay in host memory.
            on_device = sum(storage.nbytes() for storage in storages if storage.device.type == device.type)
            offloaded = sum(storage.nbytes() for storage in storages) - on_device
            offloaded += sum(backup.nbytes for _, backup in self._backups.get(kind, []))
            existing = on_device + offloaded
            missing = max(self._expected[kind]() - existing, 0) if kind in self._expected else 0
            kinds[kind] = KindMemory(on_device, offloaded, missing)
        return EngineMemory(**kinds)

    def _copy_out(self, kind: str, but: Iterable[torch.UntypedStorage]) -> list[tuple[torch.UntypedStorage, _Backup]]:
        """Copy the storages of a kind, except those that another kind has too.

        Copies to host memory may be incomplete until the device is synchronized.
        """
        copied = {storage.data_ptr() for storage in but}
        storages = [x for x in _storages(self._tensors[kind]()) if x.data_ptr() not in copied]
        if self._folder is not None:
            return [(storage, FileBackup(storage, self._folder)) for storage in storages]
        if not storages:
            return []
        sizes = [storage.nbytes() for storage in storages]
        pieces = self._blocks[kind].split(sizes, storages[0].device)
        return [(storage, _HostBackup(storage, each)) for storage, each in zip(storages, pieces, strict=True)]


def backup_folder(owner: object, folder: str) -> Path:
    """Create a directory for the files of this rank in ``offload_dir``. It is removed with its owner.

    Raises:
        ValueError: the directory does not exist or is not writable.
    """
    try:
        created = Path(tempfile.mkdtemp(prefix="offload-", dir=folder))
    except OSError as error:
        raise ValueError(f"offload_dir = {folder!r}: {error}; name a directory that can be written to") from error
    # Also removed if the owner is never closed.
    weakref.finalize(owner, shutil.rmtree, created, ignore_errors=True)
    return created


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the state tensors of a torch optimizer, except scalars."""
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state, except scalars, once every parameter was updated: AdamW or SGD."""
    parameters = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return sum(_state_bytes(optimizer, group, parameter) for group, parameter in parameters)


def _state_bytes(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int:
    """Return the bytes of the state of one parameter. State that exists counts as it is."""
    state = [x for x in optimizer.state.get(parameter, {}).values() if isinstance(x, Tensor) and x.dim()]
    if state:
        return sum(local_part(x).nbytes for x in state)
    n_moments = int(group["momentum"] != 0) if "momentum" in group else 2
    itemsize = 2 if isinstance(optimizer, BFloat16AdamW) else parameter.element_size()
    return n_moments * local_part(parameter).numel() * itemsize


def make_resizable(tensors: Iterable[Tensor]) -> None:
    """Copy tensors that are mapped from a file to memory, in place, because a mapped storage cannot be freed."""
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once, without those that are empty (offloaded)."""
    local = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    unique = {x.untyped_storage()._cdata: x.untyped_storage() for x in local if x.untyped_storage().nbytes()}
    return list(unique.values())


def _synchronize(storages: Sequence[torch.UntypedStorage]) -> None:
    """Wait for the copies from or to storages, once for each device."""
    for device in {storage.device for storage in storages}:
        platform.synchronize(device)


class _Backup(Protocol):
    """Bytes of one offloaded storage."""

    @property
    def nbytes(self) -> int: ...

    def restore(self, storage: torch.UntypedStorage) -> None: ...


class _HostBlocks:
    """Host memory in blocks, which are kept and used again."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def split(self, sizes: Sequence[int], device: torch.device) -> list[list[Tensor]]:
        """Return memory for copies from ``device``: for each size, uint8 tensors that together have so many bytes.

        The memory is that of the last call, and more if the sizes need more.
        """
        starts = list(accumulate((round_up(size, _ALIGNMENT) for size in sizes), initial=0))
        # The last block is no larger than necessary.
        missing = starts[-1] - sum(map(len, self._blocks))
        while missing > 0:
            nbytes = min(_BLOCK_BYTES, max(_ALIGNMENT, 1 << (missing - 1).bit_length()))
            self._blocks.append(platform.host_buffer(nbytes, device))
            missing -= nbytes
        return [self._pieces(start, start + size) for start, size in zip(starts, sizes, strict=False)]

    def _pieces(self, start: int, end: int) -> list[Tensor]:
        """Return the bytes from ``start`` to ``end`` of all blocks end to end."""
        pieces, begin = [], 0
        for block in self._blocks:
            piece = block[max(start - begin, 0) : max(end - begin, 0)]
            pieces += [piece] if len(piece) else []
            begin += len(block)
        return pieces


class _HostBackup:
    """Backup in host memory. Copies are enqueued: the caller synchronizes with the device."""

    def __init__(self, storage: torch.UntypedStorage, pieces: list[Tensor]) -> None:
        self._pieces = pieces
        for piece, values in self._pairs(storage):
            piece.copy_(values, non_blocking=True)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._pieces))

    def restore(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(self.nbytes)
        for piece, values in self._pairs(storage):
            values.copy_(piece, non_blocking=True)

    def _pairs(self, storage: torch.UntypedStorage) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the pieces of the backup, each with the bytes of the storage that belong there."""
        values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return zip(self._pieces, values.split([len(piece) for piece in self._pieces]), strict=True)


class FileBackup:
    """Backup in a file. The file is memory-mapped only during copies, so that it takes no memory of the process."""

    def __init__(self, storage: torch.UntypedStorage, folder: Path) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            self._path = file.name
            self.nbytes = storage.nbytes()
            _reserve(file.fileno(), self.nbytes, folder)
        self._mapped().copy_(storage)

    def restore(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(self.nbytes)
        storage.copy_(self._mapped())

    def _mapped(self) -> Any:
        return torch.UntypedStorage.from_file(self._path, shared=True, nbytes=self.nbytes)

    def __del__(self) -> None:
        Path(self._path).unlink(missing_ok=True)


def _reserve(file: int, nbytes: int, folder: Path) -> None:
    """Reserve the space of a file: a copy to a memory-mapped file on a full disk would end the process.

    Raises:
        OSError: the disk is full; names the directory.
    """
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        # Some file systems cannot reserve space.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            text = f"{os.strerror(error.errno or 0)}: {nbytes:,} bytes to offload; free some, or choose another offload_dir"
            raise OSError(error.errno, text, str(folder)) from error
