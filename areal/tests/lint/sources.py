"""The Python files that the checks read, each parsed once."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[3]
"""Folder of the repository."""


@dataclass(frozen=True)
class Source:
    """A Python file.

    Args:
        path: absolute.
        name: relative to the repository, with slashes.
    """

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Path relative to the package, as in ``engine/base.py``."""
        return self.name.removeprefix("areal/")

    def at(self, line: int, message: str) -> str:
        """Return an offence."""
        return f"{self.name}:{line}: {message}"


class Sources:
    """Python files of a repository.

    Args:
        root: folder with ``areal``, ``benchmarks``, ``examples``, ``recipes`` and ``tools``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        folders = ("areal", "benchmarks", "examples", "recipes", "tools")
        paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
        self.python = [Source(path, path.relative_to(root).as_posix()) for path in paths]
        self.package = [source for source in self.python if source.name.startswith("areal/")]
        self.tests = [source for source in self.package if "tests" in Path(source.name).parts]
        self.library = [source for source in self.package if "tests" not in Path(source.name).parts]


@functools.cache
def sources(root: Path) -> Sources:
    """Return the sources of a repository. They are parsed once for all checks."""
    return Sources(root)


Check = Callable[[Sources], Iterable[str]]
"""Yields offences, each as ``file:line: message``."""


def run(checks: Iterable[Check], root: Path) -> list[str]:
    """Return the offences that checks find below a folder."""
    return [offence for check in checks for offence in check(sources(root))]


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and name of every imported module."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
