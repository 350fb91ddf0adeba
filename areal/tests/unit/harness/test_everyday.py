"""The rule that decides which tests are everyday."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.tests.everyday.rule import SAMPLES, mark_everyday
from areal.tests.mutants.finding import TESTS, collect_files, short_id

FILE = """
import pytest
from areal.tests.harness.processes import needs_own_world

@pytest.mark.parametrize("x", [1, 2])
def test_in_process(x): ...

@pytest.mark.parametrize("backend", [
    pytest.param("jax:d1", marks=pytest.mark.world(1)),
    pytest.param("fsdp:d1", marks=pytest.mark.world(1)),
    pytest.param("megatron:d1", marks=pytest.mark.world(1)),
    pytest.param("fsdp:d2", marks=pytest.mark.world(2)),
    pytest.param("fsdp:t2", marks=pytest.mark.world(2)),
    pytest.param("fsdp:d4", marks=pytest.mark.world(4)),
])
def test_on_ranks(backend): ...

@needs_own_world
@pytest.mark.parametrize("killed", [0, 1])
def test_processes(killed): ...
"""


def test_everyday_is_all_in_process_and_the_first_case_on_one_and_on_two_ranks(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(FILE)
    items = collect_files(request, [str(file)])
    mark_everyday(items)
    assert [item.name for item in items if item.get_closest_marker("everyday")] == [
        "test_in_process[1]",
        "test_in_process[2]",
        "test_on_ranks[fsdp:d1]",
        "test_on_ranks[fsdp:d2]",
        "test_processes[0]",
    ]


@pytest.mark.parametrize("file", ["dist/step/test_grid.py", "dist/step/test_steps.py"])
def test_each_layout_of_at_most_two_ranks_is_everyday_in_float64(file: str, request: pytest.FixtureRequest) -> None:
    items = collect_files(request, [str(TESTS / file)])
    mark_everyday(items)
    cells = [(item.callspec.params["cell"], item) for item in items if "cell" in item.callspec.params]  # type: ignore[attr-defined]
    small = {cell.layout.name for cell, _ in cells if cell.layout.world <= 2 and cell.layout.engine != "jax"}
    daily = {
        cell.layout.name for cell, item in cells if item.get_closest_marker("everyday") and cell.dtype == "float64"
    }
    assert len(small) > 20
    assert daily == small


@pytest.mark.parametrize("kind", [kind for kind, sample in SAMPLES.items() if sample != "-"])
def test_one_file_of_each_kind_is_everyday(kind: str, request: pytest.FixtureRequest) -> None:
    items = collect_files(request, [str(TESTS / SAMPLES[kind].partition("::")[0])])
    mark_everyday(items)
    assert any(item.get_closest_marker("everyday") for item in items), short_id(items[0])
