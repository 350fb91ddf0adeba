"""Plants bugs one at a time and shows that the suite catches each: ``python -m areal.tests.mutants [name ...]``, or ``--list``.

First the chosen tests must pass without a bug. Then each bug is planted in fresh worker processes and in this one, and one of its
tests must fail by an assertion, after the planted function was called. Anything else, a test that passes or one that breaks down for
another reason, counts against the suite.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest._io import TerminalWriter
from _pytest.runner import runtestprotocol

from areal.tests.conftest import pools_key
from areal.tests.harness.worker import Call
from areal.tests.mutants.planting import Mutant, plant, traces
from areal.tests.mutants.registry import MUTANTS, plant_in_worker

TESTS = Path(__file__).parents[1]
GRID = "dist/step/test_grid.py"

_ASSERTION = re.compile(r"^E\s+(AssertionError|assert |Failed: |DID NOT )", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``caught``, ``survived`` or ``broken``; by which test, and what there is to say."""

    status: str
    test: str
    seconds: float
    text: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 when every mutant was caught."""
    parser = argparse.ArgumentParser(prog="python -m areal.tests.mutants", description="Plant bugs; see who notices.")
    parser.add_argument("names", nargs="*", metavar="name", help="mutants to plant; all by default")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(MUTANTS))
    if unknown:
        parser.error(f"no mutant {', '.join(unknown)}; there are {', '.join(MUTANTS)}")
    chosen = [MUTANTS[name] for name in given.names or MUTANTS]
    if given.list:
        for each in chosen:
            print(f"{each.name:34}  {each.says}")
        return 0
    runner = Runner(chosen)
    options = ["-qq", "-p", "no:cacheprovider", "-p", "no:warnings", "--no-header", "--no-summary"]
    code = pytest.main([*options, *sorted(files_of(chosen))], plugins=[runner])
    return int(code) or runner.code


def files_of(mutants: Iterable[Mutant]) -> set[str]:
    """The test files that mutants name."""
    names = {GRID if isinstance(test, Mapping) else test.split("::")[0] for each in mutants for test in each.tests}
    return {str(TESTS / name) for name in names}


def find_test(test: str | Mapping[str, str], items: Iterable[pytest.Item]) -> pytest.Function:
    """The first collected test that a mutant names.

    Raises:
        ValueError: there is none.
    """
    for item in items:
        here = Path(item.path).relative_to(TESTS).as_posix()
        if isinstance(test, str) and _is_like(here + "::" + item.nodeid.partition("::")[2], test):
            return item  # type: ignore[return-value]
    fitting = [item for item in items if isinstance(test, Mapping) and _is_cell(item, test)]
    # In float64 what is slightly wrong shows as well.
    for dtype in ("float64", "float32"):
        for item in fitting:
            if item.callspec.params["cell"].dtype == dtype:  # type: ignore[attr-defined]
                return item  # type: ignore[return-value]
    raise ValueError(f"no test is {test!r}: name one that pytest collects")


def _is_cell(item: pytest.Item, fields: Mapping[str, str]) -> bool:
    cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")  # type: ignore[attr-defined]
    if cell is None or Path(item.path) != TESTS / GRID:
        return False
    has = {**vars(cell), "layout": cell.layout.name}
    return all(_is_like(has[name], value) for name, value in fields.items())


def _is_like(text: str, pattern: str) -> bool:
    """Whether a text is what a pattern says, in which ``*`` stands for anything."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text) is not None


class Runner:
    """A pytest plugin that runs the chosen tests without a bug and then each mutant's with it."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self.code = 1
        self._mutants = mutants

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors while collecting")
        tests = {each.name: [find_test(test, session.items) for test in each.tests] for each in self._mutants}
        write = session.config.get_terminal_writer()
        width = max(map(len, tests))
        if not self._sound(write, {item.nodeid: item for items in tests.values() for item in items}):
            return True
        verdicts = {}
        for i, each in enumerate(self._mutants):
            write.write(f"{i + 1:2}/{len(tests)}  {each.name:{width}}  ", flush=True)
            verdict = verdicts[each.name] = self._try(session, each, tests[each.name])
            write.line(f"{verdict.status:8}  {verdict.seconds:5.1f} s  {verdict.test}")
            if verdict.text:
                write.line(f"{each.says}\n{verdict.text}")
        caught = sum(verdict.status == "caught" for verdict in verdicts.values())
        write.line(f"{caught} of {len(verdicts)} planted bugs were caught")
        self.code = int(caught < len(verdicts))
        return True

    def _sound(self, write: TerminalWriter, items: Mapping[str, pytest.Function]) -> bool:
        """Whether the tests pass as long as nothing is wrong."""
        start, failed = time.monotonic(), ""
        for i, item in enumerate(items.values()):
            write.write(f"{i + 1:2}/{len(items)}  without a bug  {_short(item)}  ", flush=True)
            failed = failure_of(item)
            write.line("failed" if failed else "passed")
            if failed:
                write.line(failed)
                return False
        write.line(f"{len(items)} tests pass without a bug, in {time.monotonic() - start:.0f} s")
        return True

    def _try(self, session: pytest.Session, planted: Mutant, items: Sequence[pytest.Function]) -> Verdict:
        pools = session.config.stash[pools_key]
        start, text = time.monotonic(), ""
        pools.close()
        pools.first = (Call(plant_in_worker.__module__, plant_in_worker.__name__, {"name": planted.name}),)
        patch = plant(planted)
        try:
            for item in items:
                text = failure_of(item)
                if text:
                    break
        finally:
            patch.undo()
            pools.first = ()
            pools.close()
        seconds, name = time.monotonic() - start, _short(item)
        if not traces(planted.name).exists():
            return Verdict("broken", name, seconds, f"{planted.target} was never called\n{text}")
        if not text:
            return Verdict("survived", name, seconds, "no test failed")
        if not _ASSERTION.search(text):
            return Verdict("broken", name, seconds, f"it failed, but by no assertion:\n{text}")
        return Verdict("caught", name, seconds)


def failure_of(item: pytest.Function) -> str:
    """Run a test; what it said if it did not pass, else nothing."""
    reports = runtestprotocol(item, log=False, nextitem=None)
    said = [report.longreprtext or report.outcome for report in reports if report.outcome != "passed"]
    return "\n".join(said)


def _short(item: pytest.Item) -> str:
    return f"{Path(item.path).relative_to(TESTS).as_posix()}::{item.nodeid.partition('::')[2]}"
