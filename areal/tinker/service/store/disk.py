"""A reserve of disk space for the database, for the time when checkpoints or other programs have filled the disk."""

from __future__ import annotations

import errno
import logging
import shutil
import sqlite3
from pathlib import Path

MAX_FRACTION = 0.1
"""Largest fraction of a disk that the reserve takes."""

_SQLITE_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_POSTGRES_STATE = "53100"

logger = logging.getLogger(__name__)


class DiskReserve:
    """A file of zeros, which is deleted when the database finds the disk full.

    Args:
        file: path of the file; ``None`` for a database elsewhere, which has no reserve.
        size: bytes, but at most a tenth of the disk.
    """

    def __init__(self, file: Path | None, size: int) -> None:
        self._file = file
        self._size = size

    def fill(self) -> bool:
        """Write the file if it is not there and the disk has room for twice its size. Returns whether there is a reserve."""
        if self._file is None or self._file.exists():
            return True
        try:
            disk = shutil.disk_usage(self._file.parent)
            size = min(self._size, int(disk.total * MAX_FRACTION))
            if disk.free < 2 * size:
                return False
            self._file.write_bytes(bytes(size))
        except OSError:
            self._file.unlink(missing_ok=True)
            return False
        return True

    def release(self) -> bool:
        """Delete the file. Returns whether that has made room."""
        if self._file is None or not self._file.exists():
            return False
        self._file.unlink()
        logger.error("the disk of %s is full: its reserve is used, and saves are refused", self._file.parent)
        return True


def is_disk_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk has no room."""
    cause: BaseException = getattr(error, "orig", None) or error
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOSPC, errno.EDQUOT)
    code, state = getattr(cause, "sqlite_errorcode", None), getattr(cause, "sqlstate", None)
    return code in _SQLITE_CODES or state == _POSTGRES_STATE
