"""Send weights through a directory: each version is a folder that appears complete or not at all."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from areal.api.control import Control
from areal.api.weights import NamedTensor, UpdateKind, WeightUpdateMeta
from areal.engine.checkpoint.atomic_dir import (
    FileRecord,
    Manifest,
    discard,
    is_complete,
    open_draft,
    publish,
    read_manifest,
    record,
    verify,
)
from areal.engine.checkpoint.safetensors import INDEX_FILE, TensorFiles, TensorSpec, TensorWriter, index_of
from areal.engine.model.hub import copy_model_files, read_config
from areal.utils.dtensor import full_box
from areal.weight_sync.apply import Replica
from areal.weight_sync.transport import OutgoingTensors, TensorTransport, ignore_errors

logger = logging.getLogger(__name__)

KIND = "weights"
"""Value of the field ``kind`` in the manifest of a version."""

FILE_BYTES = 512 * 2**20
"""Maximum size of a file, unless a single tensor is larger. Also the amount that is gathered on the host before
writing.
"""

_POLL_SECONDS = 0.1


def version_name(version: int) -> str:
    """Return the name of the directory of a version."""
    return f"version-{version:08d}"


class DiskTransport(TensorTransport):
    """Writes each version to ``folder/version-00000007``: safetensors files, an index and a manifest.

    A version is published by one rename. The first rank writes and keeps the tensors of one file in host memory at
    a time. The folder must not be used for anything else: published versions other than the newest ``keep`` are
    removed, once later versions have all of their tensors.

    Args:
        control: control plane over all ranks of the trainer.
        folder: directory on a file system that the receivers can read.
        keep: number of newest versions to keep, at least 1. With 2, a slow reader has the time of one more update. ``None`` keeps all.
        cast: dtype in which floating-point tensors are written.
        model: directory or hub name of the model. If given, configuration and tokenizer are written next to the
            weights, so that ``from_pretrained`` and inference servers can load a version like any model.
        file_bytes: maximum size of a file, unless a single tensor is larger.

    Raises:
        ValueError: ``keep`` or ``file_bytes`` is below 1.
    """

    commit_note = "receivers use version {version} if it is in the folder, and keep what they have otherwise"

    def __init__(
        self,
        control: Control,
        folder: str | Path,
        *,
        keep: int | None = 2,
        cast: torch.dtype | None = None,
        model: str | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep = {keep}: keep at least 1 version")
        if file_bytes < 1:
            raise ValueError(f"file_bytes = {file_bytes}: give at least 1")
        sender = _DiskSender(Path(folder), keep, model, file_bytes) if control.rank == 0 else None
        super().__init__(control, sender, cast=cast)


class _DiskSender:
    """Implements :class:`~areal.weight_sync.transport.TensorSender` on a draft directory."""

    def __init__(self, folder: Path, keep: int | None, model: str | None, file_bytes: int) -> None:
        self._folder, self._keep, self._model = folder, keep, model
        self._file_bytes = file_bytes
        self._path = folder
        self._draft: Path | None = None
        self._records: list[FileRecord] = []

    def prepare(self, version: int, kind: UpdateKind) -> None:
        self._path = self._folder / version_name(version)
        self._draft, self._records = open_draft(self._path), []
        logger.debug("%s: draft opened", self._path)

    def transfer(self, tensors: OutgoingTensors) -> None:
        draft, files = self._require_draft(), dict[str, list[TensorSpec]]()
        batch: list[NamedTensor] = []
        size = 0
        for name, tensor in tensors:
            # Write the batch before it would exceed the size of a file.
            if batch and size + tensor.nbytes > self._file_bytes:
                self._write(draft, batch, files)
                batch, size = [], 0
            # Copy to the host now: the next tensor may reuse the device memory.
            batch.append(NamedTensor(name, tensor.detach().cpu()))
            size += tensor.nbytes
        self._write(draft, batch, files)
        # Files around the weights, recorded in the manifest like the weight files.
        (draft / INDEX_FILE).write_text(json.dumps(index_of(files), indent=1))
        model_files = [] if self._model is None else _write_model_files(self._model, _main_dtype(files), draft)
        self._records += [record(draft, name) for name in [INDEX_FILE, *model_files]]
        logger.debug("%s: written", self._path)

    def commit(self, meta: WeightUpdateMeta) -> None:
        about = {"version": meta.version, "update": meta.kind, "n_tensors": meta.n_tensors, "nbytes": meta.nbytes}
        # One rename makes the version visible; afterwards it cannot be aborted. An error before it leaves a draft with all weights.
        try:
            publish(self._require_draft(), self._path, KIND, self._records, about)
        except BaseException as error:
            self.abort(str(error))
            raise
        self._draft = None
        logger.debug("%s: published", self._path)
        # Remove old versions only now, so that readers always find one.
        if self._keep is not None:
            for path in superseded(self._folder, self._keep):
                discard(path)
        logger.debug("%s: pruned", self._path)

    def abort(self, why: str) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            ignore_errors(lambda: discard(draft))

    def close(self) -> None:
        self.abort("closed")

    def _write(self, draft: Path, tensors: Sequence[NamedTensor], files: dict[str, list[TensorSpec]]) -> None:
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
        file = f"model-{len(files) + 1:05d}.safetensors"
        writer = TensorWriter(draft / file, specs)
        for i, (_, tensor) in enumerate(tensors):
            writer.write(tensor)
            if i == 0:
                logger.debug("%s: in file %d", self._path, len(files) + 1)
        writer.close()
        files[file] = specs
        self._records.append(FileRecord(file, writer.size, writer.crc32))

    def _require_draft(self) -> Path:
        if self._draft is None:
            raise RuntimeError("no update was prepared")
        return self._draft


def _main_dtype(files: dict[str, list[TensorSpec]]) -> torch.dtype:
    return next(spec.dtype for specs in files.values() for spec in specs if spec.dtype.is_floating_point)


def _write_model_files(model: str, dtype: torch.dtype, draft: Path) -> list[str]:
    """Write configuration, tokenizer and code of the model. Return the names of the files."""
    config = read_config(model)
    config.dtype = dtype
    config.save_pretrained(draft)
    return sorted({"config.json", *copy_model_files(model, draft)})


# ---- receiving


def published(folder: str | Path) -> list[tuple[Path, Manifest]]:
    """Return the complete versions in a directory, in the order of publication."""
    versions: list[tuple[Path, Manifest]] = []
    for path in sorted(Path(folder).glob("version-*")):
        try:
            manifest = read_manifest(path)
        except ValueError:
            continue  # removed meanwhile, or not a version
        if manifest.kind == KIND:
            versions.append((path, manifest))
    return sorted(versions, key=lambda entry: entry[1].sequence)


def superseded(folder: str | Path, keep: int) -> list[Path]:
    """Return the versions that can be removed: those before the newest ``keep`` of whose tensors later versions have all."""
    found: list[Path] = []
    known: set[str] = set()
    for place, (path, _) in enumerate(reversed(published(folder))):
        names = set(json.loads((path / INDEX_FILE).read_text())["weight_map"])
        if place >= keep and names <= known:
            found.append(path)
        known |= names
    return found


class DiskReceiver:
    """Loads the newest complete version of a directory into a module.

    A version is compared with the module before any value is read, and then copied tensor by tensor, without a
    second copy of the model. A version that is removed during reading stays readable to the end. If reading fails
    midway, ``version`` is ``None`` until the next update.

    Args:
        folder: directory of a :class:`DiskTransport`; may not exist yet.
        module: module to update.
        check: bool. If True, verify the checksums of the files first, which reads them twice.
    """

    def __init__(self, folder: str | Path, module: nn.Module, *, check: bool = True) -> None:
        self._folder, self._check = Path(folder), check
        self._replica = Replica(module)
        self._sequence = 0

    @property
    def version(self) -> int | None:
        return self._replica.version

    def pending(self) -> bool:
        return bool(self._pending_versions())

    def receive(self, timeout: float | None = None) -> int:
        """Implement :meth:`areal.api.WeightReceiver.receive`.

        Versions before the newest full one are skipped. Later selected updates are loaded in order; those that were
        removed had no tensor that later ones lack.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            pending = self._pending_versions()
            # A version may be removed between listing and loading: then list again.
            if pending and all(self._load(path, manifest) for path, manifest in pending):
                return int(pending[-1][1].about["version"])
            if not pending:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{self._folder}: no new version was published within {timeout:g} s")
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        pass

    def _pending_versions(self) -> list[tuple[Path, Manifest]]:
        """Return the versions to load, in order."""
        new = [entry for entry in published(self._folder) if entry[1].sequence > self._sequence]
        # The newest full version replaces everything before it.
        full = [i for i, (_, manifest) in enumerate(new) if manifest.about["update"] == "full"]
        return new[full[-1] :] if full else new

    def _load(self, path: Path, manifest: Manifest) -> bool:
        """Copy a version into the module. Return False if it was removed or replaced before."""
        with contextlib.ExitStack() as stack:
            # Open all files before reading any value: open files stay readable if the version is removed now.
            try:
                if self._check:
                    verify(path)
                files = stack.enter_context(TensorFiles.of_model(path))
                shapes = {name: files.shape(name) for name in files}  # opens every file
                # Published again under the same name in the meantime: the files may be a mixture.
                if read_manifest(path) != manifest:
                    return False
            except ValueError:
                # An error in a version that still exists is a real one.
                if not is_complete(path):
                    return False
                raise
            # From here on the module changes in place.
            self._replica.check(shapes, complete=manifest.about["update"] == "full")
            self._replica.version = None
            for name, shape in shapes.items():
                self._replica.fill(self._replica.resolve(name, shape), files.read(name, full_box(shape)))
        self._replica.version, self._sequence = int(manifest.about["version"]), manifest.sequence
        return True
