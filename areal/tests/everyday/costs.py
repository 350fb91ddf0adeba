"""CPU-seconds of tests: ``python -m areal.tests.everyday.costs FILE`` prints the most expensive, and names new expensive ones.

A session with ``--costs FILE`` writes the CPU-seconds of each test: of its function, on all ranks, and of processes that it started and
waited for. Fixtures do not count: which test starts a shared server depends on the session.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT = 3.0
"""CPU-seconds that an everyday test may take, unless it is in :data:`EXPENSIVE`."""

NOISE = 2.0
"""A test above the limit is named; above this multiple of it, the command runs it again, and fails if it is above it again. The seconds
of one test vary by so much between runs: with what its worker has imported and compiled before, with how long it waits in a loop, and
with what other processes run at the same time."""

EXPENSIVE = Path(__file__).with_name("expensive.txt")
"""Tests that may take longer: one line each, with their CPU-seconds on the machine on which the others take less than the limit."""

COST = "areal_cost"
"""Name of the property of a report that holds the CPU-seconds of a test."""


def spent() -> float:
    """Return the CPU-seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def known() -> dict[str, float]:
    """Return the CPU-seconds of the tests in :data:`EXPENSIVE`."""
    lines = (line.split(maxsplit=1) for line in EXPENSIVE.read_text().splitlines())
    return {test: float(seconds) for seconds, test in lines}


def slowness(costs: Mapping[str, float], listed: Mapping[str, float]) -> float:
    """Return how many times longer the listed tests take on this machine than their lines say, at least 1.

    Args:
        costs: CPU-seconds of each test of a run.
        listed: CPU-seconds of the tests that may be expensive.
    """
    both = [test for test in listed if test in costs]
    return max(1.0, sum(costs[test] for test in both) / sum(listed[test] for test in both)) if both else 1.0


def new_expensive(costs: Mapping[str, float], listed: Mapping[str, float]) -> dict[str, float]:
    """Return the tests above the limit that are not listed.

    The limit is scaled by the :func:`slowness` of this machine.

    Args:
        costs: CPU-seconds of each test of a run.
        listed: CPU-seconds of the tests that may be expensive.
    """
    limit = LIMIT * slowness(costs, listed)
    return {test: seconds for test, seconds in costs.items() if seconds > limit and test not in listed}


def alone(tests: Sequence[str]) -> dict[str, float]:
    """Run tests in a session without others, and return their CPU-seconds.

    Raises:
        subprocess.CalledProcessError: if one of them fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "costs.json"
        command = [sys.executable, "-m", "pytest", "-q", f"--costs={file}", *tests]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # as in `make test`
        costs: dict[str, float] = json.loads(file.read_text())
    return costs


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 1 if there are new expensive tests."""
    costs: dict[str, float] = json.loads(Path(arguments[0]).read_text())
    first = sorted(costs, key=lambda test: -costs[test])[:15]
    print(
        f"{len(costs)} tests, {sum(costs.values()):.0f} CPU-seconds without the start of sessions; the most expensive:"
    )
    for test in first:
        print(f"{costs[test]:8.1f}  {test}")
    limit = LIMIT * slowness(costs, known())
    found = new_expensive(costs, known())
    for test, seconds in found.items():
        print(
            f"{test} takes {seconds:.1f} CPU-seconds, and an everyday test on this machine at most {limit:.1f}: make it cheaper, put a "
            f"cheaper case first, or add it to {EXPENSIVE.name} with the reason in the commit"
        )
    again = [test for test, seconds in found.items() if seconds > NOISE * limit]
    failed = {test: seconds for test, seconds in alone(again).items() if seconds > NOISE * limit} if again else {}
    for test, seconds in failed.items():
        print(f"{test} takes {seconds:.1f} CPU-seconds alone")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
