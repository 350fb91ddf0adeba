"""Scalars as lines of JSON, which survive the end of the process after any step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path


class JSONLTracker:
    """Appends an object per call to a file: ``step``, ``time`` (seconds since 1970) and the scalars. Numbers that are not finite become null.

    Args:
        path: file; its directory is made. An incomplete last line, of a process that was killed, is ended first.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the scalars of one step, and flush."""
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> dict[int, dict[str, float]]:
    """Return the scalars of each step from a file of :class:`JSONLTracker`.

    The last value of a number counts, since steps are taken again after a resume. The scalars of later steps, of the run before the resume, are
    left out. Lines that are no object, as after a kill, are skipped.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        step = values.pop("step")
        for later in [each for each in steps if each > step]:
            del steps[later]
        known = {name: math.nan if value is None else value for name, value in values.items() if name != "time"}
        steps[step] = steps.get(step, {}) | known
    return steps
