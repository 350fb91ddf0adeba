"""Checkpoint directories that appear complete or not at all.

A checkpoint is written into a *draft*, a hidden directory beside its place. When everything is on the disk, a manifest that lists every file
with its size and checksum is renamed into the draft, and the draft is renamed to its place, so that a reader meets the previous
checkpoint or the new one, whatever is killed in between. What killed saves leave behind is removed by the next save.
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

_LEFTOVER = re.compile(r"^\.(?P<name>.+)\.(?P<what>draft|trash)-(?P<host>.+)-(?P<pid>\d+)-\d+$")
_STALE_SECONDS = 24 * 3600.0
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: its path within the directory, its bytes and their CRC-32."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says of itself.

    Attributes:
        kind: what was saved, such as ``"hf"`` or ``"dcp"``.
        sequence: grows with every checkpoint published in the same parent directory.
        files: every file but the manifest.
        about: what the writer wants to know again.
    """

    kind: str
    sequence: int
    files: tuple[FileRecord, ...]
    about: dict[str, Any] = field(default_factory=dict)


def open_draft(path: Path) -> Path:
    """Make an empty draft for a checkpoint at ``path``, and remove what killed saves left. Called by one rank.

    Raises:
        ValueError: something that is no checkpoint of ours stands at ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    restore(path)
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
    """Bring a file to the disk, and describe it."""
    with open(folder / name, "rb") as stream:
        os.fsync(stream.fileno())
    return describe(folder, name)


def describe(folder: Path, name: str) -> FileRecord:
    """A file's size and checksum."""
    crc32 = 0
    with open(folder / name, "rb") as stream:
        while chunk := stream.read(1 << 22):
            crc32 = zlib.crc32(chunk, crc32)
        return FileRecord(name, stream.tell(), crc32)


def publish(draft: Path, path: Path, kind: str, files: Iterable[FileRecord], about: dict[str, Any]) -> None:
    """Turn a draft, whose files are all on the disk, into the checkpoint at ``path``. Called by one rank.

    Raises:
        ValueError: a file is not there: the ranks do not share this directory.
    """
    files = tuple(sorted(files, key=lambda file: file.name))
    for file in files:
        if not (draft / file.name).is_file():
            raise ValueError(
                f"{draft / file.name} was written by another rank, but is not visible here: save to a shared directory"
            )
    sequence = 1 + max((manifest.sequence for _, manifest in _checkpoints_in(path.parent)), default=0)
    content = {"format": FORMAT, **asdict(Manifest(kind, sequence, files, about))}
    partial = draft / f"{MANIFEST}.partial"
    with open(partial, "w") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    for folder in {(draft / file.name).parent for file in files} | {draft}:
        _sync_folder(folder)
    partial.rename(draft / MANIFEST)
    _sync_folder(draft)
    _replace(draft, path)
    _sync_folder(path.parent)


def discard(folder: Path) -> None:
    """Remove a draft or a checkpoint: it is gone at once, and deleted then."""
    trash = _temporary_name(folder, "trash")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        ValueError: there is no complete checkpoint, or a later version wrote it.
    """
    restore(path)
    file = path / MANIFEST
    try:
        content = json.loads(file.read_text())
        version = content.pop("format")
        if version != FORMAT:
            raise ValueError(f"{file} has format {version}, and this version reads {FORMAT}")
        files = tuple(FileRecord(**entry) for entry in content.pop("files"))
        return Manifest(files=files, **content)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is no complete checkpoint: it has no {MANIFEST}") from error
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def is_complete(path: Path) -> bool:
    """Whether a checkpoint was published at ``path``."""
    restore(path)
    return (path / MANIFEST).is_file()


def verify(path: Path, *, part: int = 0, parts: int = 1) -> Manifest:
    """Check a checkpoint's files against its manifest: sizes of all, checksums of every ``parts``-th from ``part`` on.

    Raises:
        ValueError: there is no complete checkpoint, or a file is missing, shortened or changed; names it.
    """
    manifest = read_manifest(path)
    for index, file in enumerate(manifest.files):
        target = path / file.name
        if not target.is_file():
            raise ValueError(f"{target} is missing from the checkpoint")
        size = target.stat().st_size
        if size != file.size:
            raise ValueError(f"{target} is damaged: it has {size} bytes instead of {file.size}")
        if index % parts == part and describe(path, file.name) != file:
            raise ValueError(f"{target} is damaged: its checksum is not the one in {MANIFEST}")
    return manifest


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest complete checkpoints of a directory, by publication. Returns those removed."""
    checkpoints = sorted(_checkpoints_in(folder), key=lambda entry: entry[1].sequence)
    removed = [path for path, _ in checkpoints[: max(0, len(checkpoints) - keep)]]
    for path in removed:
        discard(path)
    return removed


def restore(path: Path) -> None:
    """Undo half of a replacement by two renames that was killed in between: the previous checkpoint comes back."""
    if path.exists():
        return
    previous = path.with_name(f".{path.name}.previous")
    with contextlib.suppress(FileNotFoundError):
        previous.rename(path)


def _replace(draft: Path, path: Path) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        draft.rename(path)
        return
    if _swap(draft, path):
        discard(draft)  # now the previous checkpoint
        return
    previous = path.with_name(f".{path.name}.previous")
    while True:
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
        try:
            draft.rename(path)
            break
        except OSError as error:  # a reader saw no checkpoint and restored the previous one: once more
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    shutil.rmtree(previous, ignore_errors=True)


def _swap(first: Path, second: Path) -> bool:
    """Let two paths change places at once, where the system and the file system can (Linux; not NFS)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0
    if not done and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EPERM):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(first), None, str(second))
    return done


def _checkpoints_in(folder: Path) -> list[tuple[Path, Manifest]]:
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.startswith(".") and (path / MANIFEST).is_file():
            with contextlib.suppress(ValueError):
                checkpoints.append((path, read_manifest(path)))
    return checkpoints


def _temporary_name(path: Path, what: str) -> Path:
    name = path.name if _LEFTOVER.match(path.name) is None else str(_LEFTOVER.sub(r"\g<name>", path.name))
    return path.with_name(f".{name}.{what}-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}")


def _remove_leftovers(path: Path) -> None:
    """Remove the drafts and trash of dead processes in the parent directory. Other engines may be saving there right now."""
    for entry in path.parent.iterdir():
        match = _LEFTOVER.match(entry.name)
        if match is None:
            continue
        here = match["host"] == socket.gethostname()
        mine = here and int(match["pid"]) == os.getpid()
        dead = here and not mine and not _is_alive(int(match["pid"]))
        same = match["name"] == path.name
        if dead or (same and (mine or not here)) or (not here and _age(entry) > _STALE_SECONDS):
            shutil.rmtree(entry, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path.with_name(f".{path.name}.previous"), ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _age(entry: Path) -> float:
    try:
        return time.time() - entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
