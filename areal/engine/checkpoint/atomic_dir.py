"""Checkpoint directories that appear complete or not at all.

A checkpoint is written into a *draft*: a hidden directory next to the final path. When all files are on disk, a manifest with
the size and checksum of every file is renamed into the draft, and the draft is renamed to the final path. So a reader finds
the previous checkpoint or the new one, wherever a process is killed. The next save removes the leftovers of killed saves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the manifest."""

# Names of drafts and trash contain the host and process that made them, so that those of dead processes are recognized.
_LEFTOVER = re.compile(r"^\.(?P<name>.+)\.(?P<what>draft|trash)-(?P<host>.+)-(?P<pid>\d+)-\d+$")
_STALE_SECONDS = 24 * 3600.0  # age at which the leftovers of another host are removed: its processes cannot be checked
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of renameat2(2)


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: path relative to the directory, size in bytes, and CRC-32."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Description of a complete checkpoint.

    Attributes:
        kind: format, such as ``"hf"`` or ``"dcp"``.
        sequence: number that increases with every checkpoint published in the same parent directory.
        files: all files except the manifest.
        about: entries of the writer, which the reader gets back.
    """

    kind: str
    sequence: int
    files: tuple[FileRecord, ...]
    about: dict[str, Any] = field(default_factory=dict)


def open_draft(path: Path) -> Path:
    """Create an empty draft for a checkpoint at ``path``, and remove leftovers of killed saves. Called by one rank.

    Raises:
        ValueError: ``path`` exists and is neither a checkpoint nor an empty directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    restore(path)
    # A save replaces the directory at the end: refuse anything that may be a user's data.
    if path.exists() and not is_complete(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"path = {str(path)!r} holds something other than a checkpoint, which a save would replace: "
            "choose another path, or remove it"
        )
    _remove_leftovers(path)
    draft = _temporary_name(path, "draft")
    draft.mkdir()
    return draft


def record(folder: Path, name: str) -> FileRecord:
    """Sync a file to disk, and return its record."""
    with open(folder / name, "rb") as stream:
        os.fsync(stream.fileno())
    return describe(folder, name)


def describe(folder: Path, name: str) -> FileRecord:
    """Return the record of a file: its size and checksum."""
    crc32 = 0
    with open(folder / name, "rb") as stream:
        while chunk := stream.read(1 << 22):
            crc32 = zlib.crc32(chunk, crc32)
        return FileRecord(name, stream.tell(), crc32)


def publish(draft: Path, path: Path, kind: str, files: Iterable[FileRecord], about: dict[str, Any]) -> None:
    """Publish a draft, whose files are all on disk, as the checkpoint at ``path``. Called by one rank.

    Raises:
        ValueError: a file is missing, because the ranks write to different file systems.
    """
    # 1. Check that the files of all ranks are visible here.
    files = tuple(sorted(files, key=lambda file: file.name))
    for file in files:
        if not (draft / file.name).is_file():
            raise ValueError(
                f"{draft / file.name} was written by another rank, but is not visible here: save to a shared directory"
            )

    # 2. Write the manifest under another name. The draft is not complete yet.
    sequence = 1 + max((manifest.sequence for _, manifest in _checkpoints_in(path.parent)), default=0)
    content = {"format": FORMAT, **asdict(Manifest(kind, sequence, files, about))}
    partial = draft / f"{MANIFEST}.partial"
    with open(partial, "w") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())

    # 3. Sync the directories, so that all files survive a crash, before the manifest gets its name.
    for folder in {(draft / file.name).parent for file in files} | {draft}:
        _sync_folder(folder)
    partial.rename(draft / MANIFEST)
    _sync_folder(draft)

    # 4. Rename the draft to its final path, and make that rename durable, too.
    _replace(draft, path)
    _sync_folder(path.parent)


def discard(folder: Path) -> None:
    """Remove a draft or a checkpoint. It disappears atomically and is deleted afterwards."""
    trash = _temporary_name(folder, "trash")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a complete checkpoint.

    Raises:
        ValueError: the checkpoint does not exist, is incomplete or damaged, or a later version wrote it.
    """
    restore(path)
    file = path / MANIFEST
    try:
        content = json.loads(file.read_text())
        # A later version may have changed the manifest.
        version = content.pop("format")
        if version != FORMAT:
            raise ValueError(f"{file} has format {version}, and this version reads {FORMAT}")
        files = tuple(FileRecord(**entry) for entry in content.pop("files"))
        return Manifest(files=files, **content)
    except FileNotFoundError as error:
        model = (path / "config.json").is_file()
        kind = "; it is the directory of a model: load it with weight_format='hf'" if model else ""
        raise ValueError(f"{path} is no complete checkpoint: it has no {MANIFEST}{kind}") from error
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint was published at ``path``."""
    restore(path)
    return (path / MANIFEST).is_file()


def verify(path: Path, *, shard: int = 0, shards: int = 1) -> Manifest:
    """Check the files of a checkpoint against its manifest.

    Args:
        path: directory of the checkpoint.
        shard, shards: the checksums of every ``shards``-th file are checked, starting with file ``shard``, so that ranks
            divide the reading. Sizes of all files are always checked.

    Raises:
        ValueError: there is no complete checkpoint, or a file is missing, truncated or changed. The error names the file.
    """
    manifest = read_manifest(path)
    for index, file in enumerate(manifest.files):
        target = path / file.name
        if not target.is_file():
            raise ValueError(f"{target} is missing from the checkpoint")
        # Sizes are cheap to compare; checksums read the files, which ranks divide among them.
        size = target.stat().st_size
        if size != file.size:
            raise ValueError(f"{target} is damaged: it has {size} bytes instead of {file.size}")
        if index % shards == shard and describe(path, file.name) != file:
            raise ValueError(f"{target} is damaged: its checksum is not the one in {MANIFEST}")
    return manifest


def prune(folder: Path, keep: int, *, source: Path | None = None) -> list[Path]:
    """Remove all but the ``keep`` most recently published checkpoints of a directory. Returns the removed paths.

    Args:
        source: resolved path of a checkpoint that is still read, and never removed.
    """
    checkpoints = sorted(_checkpoints_in(folder), key=lambda entry: entry[1].sequence)
    removed = [path for path, _ in checkpoints[: max(0, len(checkpoints) - keep)] if path.resolve() != source]
    for path in removed:
        discard(path)
    return removed


def restore(path: Path) -> None:
    """Restore the previous checkpoint if a replacement by two renames was killed in between."""
    if path.exists():
        return
    previous = path.with_name(f".{path.name}.previous")
    with contextlib.suppress(FileNotFoundError):
        previous.rename(path)


def _replace(draft: Path, path: Path) -> None:
    """Rename ``draft`` to ``path``, replacing a previous checkpoint if there is one."""
    # Nothing to replace: rename() is atomic, also onto an empty directory.
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        draft.rename(path)
        return
    # Swap both atomically, if the system can.
    if _swap(draft, path):
        discard(draft)  # now the previous checkpoint
        return
    # Two renames. If this process is killed in between, restore() undoes the first one.
    previous = path.with_name(f".{path.name}.previous")
    while True:
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
        try:
            draft.rename(path)
            break
        except OSError as error:  # a reader ran restore() in between, so that ``path`` exists again: try once more
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    shutil.rmtree(previous, ignore_errors=True)


def _swap(first: Path, second: Path) -> bool:
    """Swap two paths atomically. Return False if the system or the file system does not support it (Linux only, not NFS)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0
    if not done and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EPERM):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(first), None, str(second))
    return done


def _checkpoints_in(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints of a directory. Damaged ones are left out."""
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.startswith(".") and (path / MANIFEST).is_file():
            with contextlib.suppress(ValueError):
                checkpoints.append((path, read_manifest(path)))
    return checkpoints


def _temporary_name(path: Path, what: str) -> Path:
    """Return a new hidden path next to ``path`` that matches :data:`_LEFTOVER`, with ``what`` being draft or trash."""
    # The trash of a draft is named after the checkpoint, not after the draft.
    name = path.name if _LEFTOVER.match(path.name) is None else str(_LEFTOVER.sub(r"\g<name>", path.name))
    return path.with_name(f".{name}.{what}-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}")


def _remove_leftovers(path: Path) -> None:
    """Remove the drafts and trash of dead processes in the parent directory, where other engines may be saving now."""
    for entry in path.parent.iterdir():
        match = _LEFTOVER.match(entry.name)
        if match is None:
            continue
        this_host = match["host"] == socket.gethostname()
        this_process = this_host and int(match["pid"]) == os.getpid()
        dead = this_host and not this_process and not _is_alive(int(match["pid"]))
        same_name = match["name"] == path.name
        # A save to ``path`` is starting, so that no other draft of that name can be in use by this engine: not by this process,
        # and not by the former first rank on another host. Drafts of other names on other hosts may be in use until stale.
        replaced = same_name and (this_process or not this_host)
        if dead or replaced or (not this_host and _age(entry) > _STALE_SECONDS):
            shutil.rmtree(entry, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path.with_name(f".{path.name}.previous"), ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists and belongs to another user
        return True
    return True


def _age(entry: Path) -> float:
    try:
        return time.time() - entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _sync_folder(folder: Path) -> None:
    """Sync the entries of a directory to disk: without it, a crash could lose a file's name although its data is there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
