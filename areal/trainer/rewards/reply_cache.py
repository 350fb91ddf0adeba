"""Replies of a judge by request, in memory and optionally in a file."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from pathlib import Path

logger = logging.getLogger(__name__)


class ReplyCache:
    """The replies that were used last, by key.

    Args:
        size: maximum number of replies in memory; 0 keeps none.
        file: lines of JSON, each with ``key`` and ``text``, appended by :meth:`put` and read at the start. ``None`` for memory only.

    Raises:
        ValueError: ``size`` is negative, or 0 with a file.
        OSError: the file cannot be opened.
    """

    def __init__(self, size: int, file: str | Path | None = None) -> None:
        if size < 0 or (size == 0 and file is not None):
            raise ValueError(f"cache_size = {size}: it must be at least 0, and at least 1 with a cache_file")
        self._size = size
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._file = None if file is None else Path(file)
        if self._file is not None:
            self._read(self._file)

    def get(self, key: str) -> str | None:
        """Return the reply of a key; ``None`` if there is none."""
        if key not in self._texts:
            return None
        self._texts.move_to_end(key)
        return self._texts[key]

    def put(self, key: str, text: str) -> None:
        """Keep a reply, in place of the one that was used least recently if there are too many."""
        self._keep(key, text)
        if self._file is None:
            return
        # A reward is valid without its line in the file.
        try:
            with self._file.open("a") as file:
                file.write(json.dumps({"key": key, "text": text}) + "\n")
        except OSError as error:
            logger.warning("a judge's reply is not in its cache_file: %s", error)

    def _keep(self, key: str, text: str) -> None:
        self._texts[key] = text
        self._texts.move_to_end(key)
        while len(self._texts) > self._size:
            self._texts.popitem(last=False)

    def _read(self, path: Path) -> None:
        """Read the file, which is made if there is none."""
        wrong, line = 0, "\n"
        with path.open("a+") as file:
            file.seek(0)
            # Line by line: of a large file, the newest replies are kept.
            for line in file:
                try:
                    entry = json.loads(line)
                    self._keep(str(entry["key"]), str(entry["text"]))
                except (ValueError, KeyError, TypeError):
                    wrong += 1  # such as the last line of a process that was killed
            if not line.endswith("\n"):
                file.write("\n")
        if wrong:
            logger.warning("cache_file %s: %d lines are no replies, and are skipped", path, wrong)
