"""The tests that planted bugs name: found by a pattern of the test's id, or by fields of a cell of the grid."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from areal.tests.mutants.planting import Mutant

TESTS = Path(__file__).parents[1]
GRID = "dist/step/test_grid.py"


def files_of(mutants: Iterable[Mutant]) -> set[str]:
    """Return the test files that mutants name."""
    return {str(TESTS / file_of(test)) for each in mutants for test in each.tests}


def file_of(test: str | Mapping[str, str]) -> str:
    """Return the file of a test that a mutant names, below the directory of tests."""
    return GRID if isinstance(test, Mapping) else test.split("::")[0]


def collect_files(request: pytest.FixtureRequest, files: Iterable[str]) -> list[pytest.Item]:
    """Collect every test in these files, independently of the selection of the session."""
    session, config = request.session, request.config
    paths = [Path(file) for file in sorted(files)]
    # otherwise the hooks of conftest.py are not loaded for directories outside this session's arguments
    for path in paths:
        config.pluginmanager._loadconftestmodules(
            path, config.getoption("importmode"), config.rootpath, consider_namespace_packages=False
        )
    modules = [pytest.Module.from_parent(session, path=path) for path in paths]
    return [item for module in modules for item in session.genitems(module)]


def find_test(test: str | Mapping[str, str], items: Iterable[pytest.Item]) -> pytest.Function:
    """Return the first collected test that a mutant names.

    Raises:
        ValueError: no collected test fits.
    """
    if isinstance(test, str):
        # The file first: a pattern begins with it, and a comparison of the whole id costs more.
        file = file_of(test)
        fitting = [item for item in items if _short_path(item.path) == file and _is_like(short_id(item), test)]
    else:
        fitting = [item for item in items if _is_cell(item, test)]
        # A small error is most visible in float64.
        dtypes = ["float64", "float32"]
        fitting = [item for item in fitting if item.callspec.params["cell"].dtype in dtypes]  # type: ignore[attr-defined]
        fitting.sort(key=lambda item: dtypes.index(item.callspec.params["cell"].dtype))  # type: ignore[attr-defined]
    if not fitting:
        raise ValueError(f"no test is {test!r}: name one that pytest collects")
    return fitting[0]  # type: ignore[return-value]


def named_tests(mutants: Iterable[Mutant], items: Iterable[pytest.Item]) -> list[pytest.Function]:
    """Return those of ``items`` that mutants name. Tests in files that were not collected are left out."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(short_id(item).partition("::")[0], []).append(item)
    named: dict[str, pytest.Function] = {}
    for test in (test for each in mutants for test in each.tests):
        # Patterns begin with the file, so that no other file has to be searched.
        candidates = by_file.get(GRID if isinstance(test, Mapping) else test.split("::")[0], [])
        try:
            item = find_test(test, candidates)
        except ValueError:
            continue
        named[item.nodeid] = item
    return list(named.values())


def short_id(item: pytest.Item) -> str:
    """Return the id of a test below the directory of tests."""
    return f"{_short_path(item.path)}::{item.nodeid.partition('::')[2]}"


@functools.cache
def _short_path(path: Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else path.as_posix()


def _is_cell(item: pytest.Item, fields: Mapping[str, str]) -> bool:
    cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")  # type: ignore[attr-defined]
    if cell is None or Path(item.path) != TESTS / GRID:
        return False
    values = {**vars(cell), "layout": cell.layout.name}
    return all(_is_like(values[name], value) for name, value in fields.items())


def _is_like(text: str, pattern: str) -> bool:
    """Return whether a text matches a pattern, in which ``*`` matches anything."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text) is not None
