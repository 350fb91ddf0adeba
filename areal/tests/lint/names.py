"""Checks of names: one for each public definition and each test module, and a sentence for each folder."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from areal.tests.lint.sources import ROOT, Source, Sources, run


def public_names_are_defined_once(files: Sources) -> Iterator[str]:
    """Public functions and classes at the top level of the library's modules.

    But for the migrations, whose names Alembic gives, and for the recipes, which are called like their algorithms.
    """
    places: dict[str, list[tuple[Source, int]]] = defaultdict(list)
    elsewhere = ("/migrations/versions/", "areal/recipes/assemble.py")
    for source in (each for each in files.library if not any(part in each.name for part in elsewhere)):
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append((source, node.lineno))
    for name, its in places.items():
        first, *others = its
        for source, line in others:
            if source is not first[0]:
                yield source.at(line, f"{name} is defined in {first[0].name} too: one name for one thing")


def folders_are_described(files: Sources) -> Iterator[str]:
    """The docstring of ``__init__.py`` begins with one sentence on what belongs to the folder."""
    modules = {source.name: source for source in files.package}
    for folder in sorted({Path(source.name).parent for source in files.package}):
        name = (folder / "__init__.py").as_posix()
        docstring = ast.get_docstring(modules[name].tree) if name in modules else None
        if not re.search(r"\w[.:]", (docstring or "").split("\n\n")[0]):
            yield f"{name}:1: begin with a sentence on what belongs to the folder"


def test_modules_have_different_names(files: Sources) -> Iterator[str]:
    """The name of a test module is that of its topic, and not of a folder in which it is unique."""
    first: dict[str, Source] = {}
    for source in files.tests:
        name = source.path.name
        if name.startswith("test_") and first.setdefault(name, source) is not source:
            yield source.at(1, f"{first[name].name} has the same name: name each after its topic")


CHECKS = (public_names_are_defined_once, folders_are_described, test_modules_have_different_names)


def offences(root: Path = ROOT) -> list[str]:
    return run(CHECKS, root)
