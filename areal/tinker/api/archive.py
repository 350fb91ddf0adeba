"""Tar archives that are written while they are sent."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PIECE_BYTES_OF_FILE = 1024 * 1024
END = bytes(2 * tarfile.BLOCKSIZE)


def _header(folder: Path, name: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = (folder / name).stat().st_size
    return info.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def archive_bytes(folder: Path, names: Sequence[str]) -> int:
    """Return the size of the archive of files in a folder."""
    sizes = [(folder / name).stat().st_size for name in names]
    return sum(len(_header(folder, name)) for name in names) + sum(size + _padding(size) for size in sizes) + len(END)


def archive_pieces(folder: Path, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the archive of files in a folder, in pieces."""
    for name in names:
        yield _header(folder, name)
        size = 0
        with (folder / name).open("rb") as file:
            while piece := file.read(PIECE_BYTES_OF_FILE):
                size += len(piece)
                yield piece
        yield bytes(_padding(size))
    yield END
