"""pytest hooks that plant bugs after the tests of a session, or without them; conftest.py loads them for the option ``--plant``.

Each bug is an item behind all tests. The tests that it names must first pass without the bug: in any session that shares the directory
of this one, or else here. Then the bug is planted in fresh worker processes and in this one, and one of these tests must fail by an
assertion, after the planted function was called. Anything else, a test that passes or one that breaks down for another reason, is a
failure.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.runner import SetupState, runtestprotocol

from areal.tests.harness.pool import GRACE, RECORD, Pools, pools_key
from areal.tests.harness.worker import Answer, Call
from areal.tests.harness.world import world
from areal.tests.mutants.choosing import choose
from areal.tests.mutants.finding import file_of, find_test, short_id
from areal.tests.mutants.passed import add_passed, passed_tests
from areal.tests.mutants.planting import Mutant, plant, traces
from areal.tests.mutants.registry import MUTANTS, plant_in_worker

LIMIT = 600.0
"""Seconds that the tests of one planted bug may take together."""

_ASSERTION = re.compile(r"^E\s+(AssertionError|assert |Failed: |DID NOT )", re.MULTILINE)
_sound_key = pytest.StashKey[set[str]]()
_choice_key = pytest.StashKey[str]()


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant: ``caught``, ``survived`` or ``broken``, the test that decided it, and an explanation."""

    status: str
    test: str
    text: str = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    # A bug may name a test that the selection of this session leaves out.
    collected = list(items)
    yield
    try:
        choice = choose(config.getoption("plant"), MUTANTS)
    except ValueError as error:
        raise pytest.UsageError(f"--plant: {error}") from None
    config.stash[_choice_key] = choice.text
    bugs = planted_bugs(session, choice.names, collected)
    items[:] = bugs if config.getoption("only_planted") else [*items, *bugs]


def planted_bugs(session: pytest.Session, names: Sequence[str], items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return an item for each mutant. Mutants that name the same tests follow one another, to run them once without a bug.

    Args:
        names: of mutants.
        items: the tests that were collected, of which the mutants name some.
    """
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(short_id(item).partition("::")[0], []).append(item)
    position = {id(item): i for i, item in enumerate(items)}
    bugs = []
    for name in names:
        tests: list[pytest.Function] = []
        missing = ""
        for test in MUTANTS[name].tests:
            try:
                tests.append(find_test(test, by_file.get(file_of(test), ())))
            except ValueError as error:
                missing = str(error)
        first = position[id(tests[0])] if tests else len(items)
        bugs.append((first, PlantedBug.from_parent(session, name=name, tests=tests, missing=missing)))
    return [bug for _, bug in sorted(bugs, key=lambda entry: entry[0])]


class PlantedBug(pytest.Item):
    """An item that passes when one of the mutant's tests fails by an assertion.

    Args:
        tests: of the mutant.
        missing: why a test of it was not collected; empty otherwise.
    """

    def __init__(self, *, tests: Sequence[pytest.Function], missing: str = "", **fields: Any) -> None:
        super().__init__(**fields)
        self._planted, self._tests, self._missing = MUTANTS[self.name], tests, missing
        self.add_marker(pytest.mark.timeout(LIMIT))

    def runtest(self) -> None:
        if self._missing:
            pytest.fail(f"{self._missing}; run all tests, or the files that the bug names", pytrace=False)
        start = time.monotonic()
        if _sound_key not in self.config.stash:
            # The tests are over, or nearly: their workers would keep their memory while others run with a bug.
            self.config.stash[pools_key].close()
        with _nested(self.session):
            self._require_sound()
            verdict = _try(self.config, self._planted, self._tests)
        columns = {"verdict": verdict.status, "seconds": f"{time.monotonic() - start:.1f}", "by": verdict.test}
        self.user_properties.append((RECORD, (self.config.stash[_choice_key], self.name, columns)))
        if verdict.status != "caught":
            said = f"{verdict.status}: {self._planted.says}\n{verdict.test}\n{verdict.text}"
            pytest.fail(said, pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self._tests[0].path if self._tests else self.path, None, self.name

    def _require_sound(self) -> None:
        """Fail unless the tests pass as long as nothing is wrong. This also fills the caches of the session with right values."""
        sound = self.config.stash.setdefault(_sound_key, set())
        if any(item.nodeid not in sound for item in self._tests):
            sound |= passed_tests()
        for item in self._tests:
            text = "" if item.nodeid in sound else failure_of(item)
            if text:
                pytest.fail(f"without the bug, {short_id(item)} fails:\n{text}", pytrace=False)
            if item.nodeid not in sound:
                add_passed(item.nodeid)
                sound.add(item.nodeid)


def _try(config: pytest.Config, planted: Mutant, items: Sequence[pytest.Function]) -> Verdict:
    """Run the tests with the bug until one fails."""
    text, pools = "", config.stash[pools_key]
    traces(planted.name).unlink(missing_ok=True)
    # The workers of the session stay without the bug, for the next mutant.
    config.stash[pools_key] = buggy = Pools(pools.cache, pools.logs / "planted")
    buggy.grace = _grace
    buggy.first = (Call(plant_in_worker.__module__, plant_in_worker.__name__, {"name": planted.name}),)
    patch = plant(planted)
    try:
        for item in items:
            text = failure_of(item)
            if text:
                break
    finally:
        patch.undo()
        buggy.close()
        config.stash[pools_key] = pools
    name = short_id(item)
    if not traces(planted.name).exists():
        return Verdict("broken", name, f"{planted.target} was never called\n{text}")
    if not text:
        return Verdict("survived", name, "no test failed")
    if not _ASSERTION.search(text):
        return Verdict("broken", name, f"it failed, but by no assertion:\n{text}")
    return Verdict("caught", name)


def _grace(answer: Answer) -> float:
    """Return how long other ranks may still run. An assertion of one rank decides; after another error, a rank may yet reach one."""
    return 0.5 if _ASSERTION.search(answer.text) else GRACE


def failure_of(item: pytest.Item) -> str:
    """Run a test. Returns the report of its failure; empty when it passed."""
    world().records.clear()
    reports = runtestprotocol(item, log=False, nextitem=None)
    item.user_properties.clear()
    return "\n".join(report.longreprtext or report.outcome for report in reports if report.outcome != "passed")


@contextmanager
def _nested(session: pytest.Session) -> Iterator[None]:
    """Allow tests to be set up within another: pytest keeps one stack of nodes that are set up, and theirs is not this item's."""
    outer, session._setupstate = session._setupstate, SetupState()
    try:
        yield
    finally:
        session._setupstate = outer
