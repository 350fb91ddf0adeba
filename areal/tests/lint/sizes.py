"""Checks of sizes: lines of files and functions, and files of a folder."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from areal.tests.lint.sources import ROOT, Sources, run

FILE_LINES, FUNCTION_LINES, FOLDER_FILES = 400, 85, 15


def files_are_short(files: Sources) -> Iterator[str]:
    """Tests, examples and benchmarks too."""
    for source in files.python:
        lines = len(source.text.splitlines())
        if lines > FILE_LINES:
            yield source.at(lines, f"{lines} lines, and a file may have {FILE_LINES}: split it by topic")


def functions_are_short(files: Sources) -> Iterator[str]:
    """Functions of the library."""
    for source in files.library:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno
                if lines > FUNCTION_LINES:
                    yield source.at(node.lineno, f"{node.name} has {lines} lines, and may have {FUNCTION_LINES}")


def folders_are_small(files: Sources) -> Iterator[str]:
    """Modules of a folder below ``areal``, tests included, without ``__init__.py``."""
    folders = Counter(Path(source.name).parent for source in files.package if source.path.name != "__init__.py")
    for folder, count in folders.items():
        if count > FOLDER_FILES:
            yield f"{folder}/__init__.py:1: {count} modules, and a folder may have {FOLDER_FILES}: make a folder in it"


CHECKS = (files_are_short, functions_are_short, folders_are_small)


def offences(root: Path = ROOT) -> list[str]:
    return run(CHECKS, root)
