"""The planted bugs stay plantable: what each replaces is there, and so are the tests that must catch it."""

from __future__ import annotations

from pathlib import Path

import pytest

import areal.engine.context_parallel as defines
import areal.engine.model_inputs as imports
from areal.tests.mutants import files_of, find_test
from areal.tests.mutations import MUTANTS
from areal.tests.planting import Mutant, find_target, plant, traces


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Every test in the files that mutants name, collected once more, as this session may have chosen others."""
    session = request.session
    modules = [pytest.Module.from_parent(session, path=Path(file)) for file in sorted(files_of(MUTANTS.values()))]
    return [item for module in modules for item in session.genitems(module)]


@pytest.mark.parametrize("planted", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_says_what_is_wrong_and_names_what_is_there(planted: Mutant, collected: list[pytest.Item]) -> None:
    assert planted.says.endswith(".")
    assert "\n" not in planted.says
    owner, attribute = find_target(planted)
    assert callable(planted.mutate(getattr(owner, attribute)))
    for test in planted.tests:
        find_test(test, collected)


def test_planting_replaces_every_import_counts_and_is_undone() -> None:
    right, planted = defines.position_ids, MUTANTS["positions_run_on"]
    patch = plant(planted)
    try:
        assert not traces(planted.name).exists()
        for module in (defines, imports):
            assert module.position_ids((2, 1), 3).tolist() == [0, 1, 2]
        assert traces(planted.name).exists()
    finally:
        patch.undo()
        traces(planted.name).unlink(missing_ok=True)
    assert right is defines.position_ids is imports.position_ids
    assert right((2, 1), 3).tolist() == [0, 1, 0]


def test_a_test_that_is_not_there_is_named(collected: list[pytest.Item]) -> None:
    with pytest.raises(ValueError, match="test_nothing"):
        find_test("dist/test_steps.py::test_nothing", collected)
    with pytest.raises(ValueError, match="no_such_layout"):
        find_test({"layout": "no_such_layout"}, collected)
