"""Files that are replaced as a whole: a reader, or a process after a kill, finds the old one or the new one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path next to ``path`` with the same suffix, whose file replaces that of ``path`` at the end."""
    draft = path.with_name(f"part-{path.name}")
    yield draft
    draft.replace(path)
