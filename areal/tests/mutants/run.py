"""Plants bugs one at a time and shows that the suite catches each: ``python -m areal.tests.mutants [name ...]``, or ``--list``.

Each bug is a test item of a pytest session (:mod:`areal.tests.mutants.plugin`), so that several sessions share the work (``-n``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest

from areal.tests.mutants.choosing import choose
from areal.tests.mutants.finding import files_of
from areal.tests.mutants.registry import MUTANTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 when every mutant was caught."""
    parser = argparse.ArgumentParser(
        prog="python -m areal.tests.mutants", description="Plant bugs one at a time; check that the tests catch each."
    )
    parser.add_argument("names", nargs="*", metavar="name", help="mutants to plant; all by default")
    parser.add_argument("--changed-since", metavar="REF", help="plant those that a change since this commit touches")
    parser.add_argument("--part", metavar="K/N", help="plant this part of the others, drawn by the commit")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument(
        "-n", type=int, default=0, help="sessions that share the work; 0, the default, runs in this one"
    )
    parser.add_argument(
        "--keep", default="", metavar="DIR", help="directory in which an earlier session kept what passed"
    )
    given = parser.parse_args(arguments)
    chosen = [*given.names, given.changed_since and f"changed:{given.changed_since}", given.part]
    try:
        choice = choose(",".join(filter(None, chosen)) or "all", MUTANTS)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        for name in choice.names:
            print(f"{name:34}  {MUTANTS[name].says}")
        return 0
    print(choice.text, flush=True)
    if not choice.names:
        return 0
    # Only the files with the tests that they name are collected.
    files = sorted(files_of(MUTANTS[name] for name in choice.names))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:warnings", "-n", str(given.n), "--dist", "worksteal"]
    return int(
        pytest.main([*options, f"--plant={','.join(choice.names)}", "--only-planted", f"--keep={given.keep}", *files])
    )
