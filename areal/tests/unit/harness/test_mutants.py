"""Planted bugs can be planted: the function that each replaces and the tests that must catch it exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import areal.engine.attention.context_parallel as imports
import areal.engine.attention.gather_kv as defines
import areal.tests.mutants.run as run
from areal.tests.harness.world import World
from areal.tests.mutants.finding import collect_files, files_of, find_test
from areal.tests.mutants.planting import find_target, plant, traces
from areal.tests.mutants.registry import MUTANTS
from areal.tests.mutants.run import PlantedBug, keep_passed, kept_tests


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Collect every test in the files that mutants name, independently of the selection of this session."""
    return collect_files(request, files_of(MUTANTS.values()))


def test_mutants_have_a_description_a_target_and_existing_tests(collected: list[pytest.Item]) -> None:
    for name, planted in MUTANTS.items():
        assert planted.says.endswith("."), f"the docstring of {name} is not a sentence: {planted.says!r}"
        assert "\n" not in planted.says, f"the docstring of {name} has several lines"
        # The target exists, and the mutant makes a function from it.
        owner, attribute = find_target(planted)
        assert callable(planted.mutate(getattr(owner, attribute))), name
        # Raises, naming the test, if pytest does not collect it.
        for test in planted.tests:
            find_test(test, collected)


def test_plant_replaces_every_import_and_can_be_undone() -> None:
    right, planted, ranks = defines.zigzag_restore, MUTANTS["zigzag_not_undone"], torch.tensor([0, 3, 1, 2])
    patch = plant(planted)
    try:
        assert not traces(planted.name).exists()
        for module in (defines, imports):
            assert module.zigzag_restore(ranks, 2).tolist() == [0, 3, 1, 2]
        assert traces(planted.name).exists()
    finally:
        patch.undo()
        traces(planted.name).unlink(missing_ok=True)
    assert right is defines.zigzag_restore is imports.zigzag_restore
    assert right(ranks, 2).tolist() == [0, 1, 2, 3]


def test_find_test_raises_on_a_missing_test(collected: list[pytest.Item]) -> None:
    with pytest.raises(ValueError, match="test_nothing"):
        find_test("dist/step/test_steps.py::test_nothing", collected)
    with pytest.raises(ValueError, match="no_such_layout"):
        find_test({"layout": "no_such_layout"}, collected)


def test_tests_that_an_earlier_session_kept_are_not_run_again_without_the_bug(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "world", lambda: World(0, 1, tmp_path))
    monkeypatch.setattr(run, "_sound_key", pytest.StashKey[set[str]]())
    ran: list[str] = []
    monkeypatch.setattr(run, "failure_of", lambda item: ran.append(item.name) or "it fails")
    assert kept_tests() == set()
    keep_passed([request.node.nodeid, "another"])
    assert kept_tests() == {request.node.nodeid, "another"}
    PlantedBug.from_parent(request.session, name="zigzag_not_undone", tests=[request.node])._require_sound()
    assert not ran

    keep_passed(["another"])
    monkeypatch.setattr(run, "_sound_key", pytest.StashKey[set[str]]())
    with pytest.raises(pytest.fail.Exception, match=r"without the bug, .* fails:\nit fails"):
        PlantedBug.from_parent(request.session, name="zigzag_not_undone", tests=[request.node])._require_sound()
    assert ran == [request.node.name]
