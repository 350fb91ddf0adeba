"""The tests that passed, by id, in a file of the directory that all sessions of a run share. Planted bugs rely on them."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from areal.tests.harness.world import world

SOURCES = Path(__file__).parents[2]


def add_passed(test: str) -> None:
    """Add the id of a test."""
    # A short line that is appended in one call stays in one piece when several processes write.
    with open(_file(), "a") as file:
        file.write(f"{test}\n")


def passed_tests() -> set[str]:
    """Return the ids of the tests that passed with these sources, in any session that shares the directory."""
    path = _file()
    return set(path.read_text().splitlines()) if path.exists() else set()


def _file() -> Path:
    # The directory may be older than the sources.
    return world().cache / f"passed-{_digest_of_sources()}.txt"


@functools.cache
def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.relative_to(SOURCES).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
