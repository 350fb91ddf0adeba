"""Plants bugs one at a time and shows that the suite catches each: ``python -m areal.tests.mutants [name ...]``, or ``--list``.

Each bug is a test item of a pytest session, so that several sessions share the work (``-n``). The tests that it names must first pass
without the bug: in this command, or in an earlier session whose directory it is given (``--keep`` in both). Then the bug is planted in
fresh worker processes and in this one, and one of these tests must fail by an assertion, after the planted function was called. Anything
else, a test that passes or one that breaks down for another reason, is a failure.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import SetupState, runtestprotocol

from areal.tests.harness.pool import RECORD, Pools, pools_key
from areal.tests.harness.worker import Call
from areal.tests.harness.world import world
from areal.tests.mutants.finding import files_of, find_test, short_id
from areal.tests.mutants.planting import Mutant, plant, traces
from areal.tests.mutants.registry import MUTANTS, plant_in_worker

LIMIT = 600.0
"""Seconds that the tests of one planted bug may take together."""

_ASSERTION = re.compile(r"^E\s+(AssertionError|assert |Failed: |DID NOT )", re.MULTILINE)
_sound_key = pytest.StashKey[set[str]]()


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant: ``caught``, ``survived`` or ``broken``, the test that decided it, and an explanation."""

    status: str
    test: str
    text: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 when every mutant was caught."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.tests.mutants", description="Plant bugs one at a time; check that the tests catch each."
    )
    parser.add_argument("names", nargs="*", metavar="name", help="mutants to plant; all by default")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument(
        "-n", type=int, default=0, help="sessions that share the work; 0, the default, runs in this one"
    )
    parser.add_argument(
        "--keep", default="", metavar="DIR", help="directory in which an earlier session kept what passed"
    )
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(MUTANTS))
    if unknown:
        parser.error(f"no mutant {', '.join(unknown)}; there are {', '.join(MUTANTS)}")
    names = given.names or list(MUTANTS)
    if given.list:
        for name in names:
            print(f"{name:34}  {MUTANTS[name].says}")
        return 0
    files = sorted(files_of(MUTANTS[name] for name in names))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:warnings", "-n", str(given.n), "--dist", "worksteal"]
    return int(pytest.main([*options, f"--planted={','.join(names)}", f"--keep={given.keep}", *files]))


def keep_passed(tests: Iterable[str]) -> None:
    """Write the ids of tests that passed, next to the right values that they left in the caches."""
    _passed_file().write_text("\n".join(tests))


def kept_tests() -> set[str]:
    """Return the ids of the tests that an earlier session has kept."""
    path = _passed_file()
    return set(path.read_text().splitlines()) if path.exists() else set()


def _passed_file() -> Path:
    return world().cache / "passed.txt"


def planted_bugs(session: pytest.Session, names: Sequence[str]) -> list[pytest.Item]:
    """Return an item for each mutant. Mutants that name the same tests follow one another, to run them once without a bug."""
    tests = {name: [find_test(test, session.items) for test in MUTANTS[name].tests] for name in names}
    position = {id(item): i for i, item in enumerate(session.items)}
    ordered = sorted(names, key=lambda name: position[id(tests[name][0])])
    return [PlantedBug.from_parent(session, name=name, tests=tests[name]) for name in ordered]


class PlantedBug(pytest.Item):
    """An item that passes when one of the mutant's tests fails by an assertion."""

    def __init__(self, *, tests: Sequence[pytest.Function], **fields: Any) -> None:
        super().__init__(**fields)
        self._planted, self._tests = MUTANTS[self.name], tests
        self.add_marker(pytest.mark.timeout(LIMIT))

    def runtest(self) -> None:
        start = time.monotonic()
        with _nested(self.session):
            self._require_sound()
            verdict = _try(self.config, self._planted, self._tests)
        columns = {"verdict": verdict.status, "seconds": f"{time.monotonic() - start:.1f}", "by": verdict.test}
        self.user_properties.append((RECORD, ("planted bugs", self.name, columns)))
        if verdict.status != "caught":
            said = f"{verdict.status}: {self._planted.says}\n{verdict.test}\n{verdict.text}"
            pytest.fail(said, pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self._tests[0].path, None, self.name

    def _require_sound(self) -> None:
        """Fail unless the tests pass as long as nothing is wrong. This also fills the caches of the session with right values."""
        sound = self.config.stash.setdefault(_sound_key, kept_tests())
        for item in self._tests:
            text = "" if item.nodeid in sound else failure_of(item)
            if text:
                pytest.fail(f"without the bug, {short_id(item)} fails:\n{text}", pytrace=False)
            sound.add(item.nodeid)


def _try(config: pytest.Config, planted: Mutant, items: Sequence[pytest.Function]) -> Verdict:
    """Run the tests with the bug until one fails."""
    text, pools = "", config.stash[pools_key]
    traces(planted.name).unlink(missing_ok=True)
    # The workers of the session stay without the bug, for the next mutant.
    config.stash[pools_key] = buggy = Pools(pools.cache, pools.logs / "planted")
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
