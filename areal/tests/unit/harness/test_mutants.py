"""Planted bugs can be planted: the function that each replaces and the tests that must catch it exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import transformers

import areal.engine.attention.context_parallel as imports
import areal.engine.attention.gather_kv as defines
import areal.tests.mutants.passed as passed
import areal.tests.mutants.plugin as plugin
from areal.tests.harness.pool import GRACE
from areal.tests.harness.worker import Answer
from areal.tests.harness.world import World
from areal.tests.mutants.choosing import ROOT, choose, files_that_concern
from areal.tests.mutants.finding import collect_files, files_of, find_test
from areal.tests.mutants.passed import add_passed, passed_tests
from areal.tests.mutants.planting import Mutant, find_target, plant, traces
from areal.tests.mutants.plugin import PlantedBug, planted_bugs
from areal.tests.mutants.registry import MUTANTS
from areal.tests.zoo import table


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
            # Another release of transformers may lack a family.
            if not (isinstance(test, str) and test.startswith("zoo/")) or table.read()[0] == transformers.__version__:
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


def test_tests_that_passed_are_not_run_again_without_the_bug(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed, "world", lambda: World(0, 1, tmp_path))
    monkeypatch.setattr(plugin, "_sound_key", pytest.StashKey[set[str]]())
    ran: list[str] = []
    failures = ["it fails", ""]
    monkeypatch.setattr(plugin, "failure_of", lambda item: ran.append(item.name) or failures.pop(0))
    bug = PlantedBug.from_parent(request.session, name="zigzag_not_undone", tests=[request.node])
    with pytest.raises(pytest.fail.Exception, match=r"without the bug, .* fails:\nit fails"):
        bug._require_sound()
    assert passed_tests() == set()
    bug._require_sound()
    assert passed_tests() == {request.node.nodeid}
    assert ran == [request.node.name] * 2

    # Another session passed it.
    monkeypatch.setattr(plugin, "_sound_key", pytest.StashKey[set[str]]())
    bug._require_sound()
    add_passed("another")
    assert passed_tests() == {request.node.nodeid, "another"}
    assert len(ran) == 2

    # What passed with other sources does not count.
    monkeypatch.setattr(passed, "_digest_of_sources", lambda: "other")
    assert passed_tests() == set()


def test_bugs_follow_the_order_of_their_tests_and_a_missing_test_fails(request: pytest.FixtureRequest) -> None:
    names = ["links_followed", "few_samples_lose_one", "ids_not_checked"]
    items = collect_files(request, files_of([MUTANTS[name] for name in ("ids_not_checked", "links_followed")]))
    items.sort(key=lambda item: "validation" not in item.nodeid)
    bugs = planted_bugs(request.session, names, items)
    assert [bug.name for bug in bugs] == ["ids_not_checked", "links_followed", "few_samples_lose_one"]
    with pytest.raises(pytest.fail.Exception, match=r"no test is 'dist/dispatch/test_shard_parity.py::.*run all tests"):
        bugs[-1].runtest()


def test_only_an_assertion_shortens_the_grace_of_other_ranks() -> None:
    assert plugin._grace(Answer("failed", "test.py:1: in test\nE   assert 1 == 2")) < 1
    assert plugin._grace(Answer("failed", "test.py:1: in test\nE   RuntimeError: connection closed")) == GRACE
    assert plugin._grace(Answer("died", "exit code 7")) == GRACE


# ---- which bugs are planted

FEW = {
    name: Mutant(
        name, "A bug.", f"areal.engine.{name}:f", lambda right: right, (f"unit/engine/test_{name}.py::test_f",)
    )
    for name in ("a", "b", "c", "d", *(f"other{i}" for i in range(76)))
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with two commits: the second one changes a target, and adds a test."""

    def git(*arguments: str) -> None:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *settings, *arguments], check=True, capture_output=True)

    (tmp_path / "areal/engine").mkdir(parents=True)
    (tmp_path / "areal/tests/unit/engine").mkdir(parents=True)
    (tmp_path / "areal/engine/a.py").write_text("a = 1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "areal/engine/a.py").write_text("a = 2")
    (tmp_path / "areal/tests/unit/engine/test_b.py").write_text("b = 2")
    git("add", ".")
    git("commit", "-q", "-m", "second")
    return tmp_path


def test_chosen_bugs_are_those_that_a_change_touches_and_a_part_of_the_others(checkout: Path) -> None:
    assert files_that_concern(FEW["a"]) >= {"areal/engine/a.py", "areal/tests/unit/engine/test_a.py"}
    assert choose("changed", FEW, checkout).names == ("a", "b")
    assert choose("changed:HEAD", FEW, checkout).names == ()
    # A file that is not committed yet counts.
    (checkout / "areal/engine/c").mkdir()
    (checkout / "areal/engine/c/__init__.py").touch()
    assert choose("changed:HEAD,d", FEW, checkout).names == ("c", "d")

    chosen = choose("1/4,changed", FEW, checkout)
    assert chosen == choose("changed,1/4", FEW, checkout)
    assert {"a", "b", "c"} < set(chosen.names)
    drawn = len(chosen.names) - 3
    assert 0 < drawn < 40
    assert chosen.text == (
        f"planted {drawn + 3} of 80: 3 of 3 that changes since HEAD^1 touch, {drawn} of 77 others, drawn by the commit"
    )
    # The parts add up to all, and another commit draws other bugs.
    parts = [choose(f"{k}/4", FEW, checkout).names for k in (1, 2, 3, 4)]
    assert sorted(name for part in parts for name in part) == sorted(FEW)
    assert choose("1/4", FEW, ROOT).names != parts[0]


def test_without_history_no_bug_is_touched_and_a_part_is_drawn(tmp_path: Path, checkout: Path) -> None:
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{checkout}", tmp_path / "clone"], check=True)
    for root in (tmp_path / "clone", Path("/")):
        chosen = choose("changed,1/2", FEW, root)
        assert "no history since HEAD^1" in chosen.text
        assert 0 < len(chosen.names) < 80
    assert choose("1/2", FEW, tmp_path / "clone").names == choose("1/2", FEW, checkout).names


def test_change_of_many_files_plants_a_24th(checkout: Path) -> None:
    for name in FEW:
        (checkout / "areal/engine" / f"{name}.py").write_text("x = 3")
    chosen = choose("changed", FEW, checkout)
    assert len(chosen.names) == 3
    assert "3 of 80 that changes since HEAD^1 touch" in chosen.text


@pytest.mark.parametrize(
    ("selection", "message"), [("a,z", "no planted bug is called 'z'"), ("3/2", "3/2 is no part"), ("0/4", "0/4 is no")]
)
def test_selections_that_choose_nothing_raise(selection: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(selection, FEW)
