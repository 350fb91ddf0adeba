"""A patch of source files, applied in this process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import areal

ROOT = Path(areal.__file__).parents[1]


@dataclass(frozen=True)
class Patch:
    """New text of source files, in the order of their imports.

    Attributes:
        files: path in the repository -> the text of a new file, or what is inserted after which lines of a file that exists.
    """

    files: Mapping[str, str | Mapping[str, str]]

    def without(self, path: str) -> Patch:
        """Return the patch of somebody who forgot to edit this file."""
        return Patch({**self.files, path: {}})

    def apply(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Execute the patched files, and let the library refer to what they define. ``monkeypatch`` undoes that.

        The other modules stay as they are: a second process would spend seconds on imports that change nothing.
        """
        for path, text in self.files.items():
            copy = folder / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text if isinstance(text, str) else inserted(path, text))
            _replace(path, copy, monkeypatch)


def inserted(path: str, texts: Mapping[str, str]) -> str:
    """Return the text of a file with insertions."""
    lines = (ROOT / path).read_text().splitlines(keepends=True)
    for after, text in texts.items():
        places = [number for number, line in enumerate(lines) if line.strip() == after.strip()]
        assert places, f"{path} has no line {after!r} any more: choose another one in this patch"
        lines.insert(places[-1] + 1, text)
    return "".join(lines)


def _replace(path: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import a file in the place of the module with its path."""
    names = [*Path(path).parent.parts, Path(path).stem]
    package = names[-1] == "__init__"
    name = ".".join(names[:-1] if package else names)
    old = sys.modules.get(name)
    spec = importlib.util.spec_from_file_location(
        name, copy, submodule_search_locations=[str((ROOT / path).parent)] if package else None
    )
    assert spec is not None
    assert spec.loader is not None
    new = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, new)
    parent, _, last = name.rpartition(".")
    monkeypatch.setattr(sys.modules[parent], last, new, raising=False)
    spec.loader.exec_module(new)
    # Modules that have imported from the old one.
    for module, attribute, value in _uses(name, old):
        if attribute in vars(new) and getattr(module, attribute) is value:
            monkeypatch.setattr(module, attribute, getattr(new, attribute))


def _uses(name: str, old: ModuleType | None) -> list[tuple[ModuleType, str, Any]]:
    """Return each reference of the library to what a module defines: where it is, and its name there."""
    if old is None:
        return []
    own = {key: value for key, value in vars(old).items() if getattr(value, "__module__", None) == name}
    library = [each for key, each in sys.modules.items() if key.startswith("areal.") and ".tests" not in key]
    return [
        (each, key, value) for each in library if each is not old for key, value in own.items() if key in vars(each)
    ]
