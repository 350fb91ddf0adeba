"""Run the zoo and write its table: ``python -m areal.tests.zoo``, or some families: ``python -m areal.tests.zoo mamba bert``.

Each family runs in a separate process with a time limit, one after the other.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

import torch
import transformers

from areal.engine.registry import engine_class
from areal.tests.zoo import table
from areal.tests.zoo.configs import FAMILIES
from areal.tests.zoo.examine import FAULTS, Finding, examine

TIME_LIMIT = 120.0
"""Seconds for one family. On an idle core the slowest takes ten."""


def main() -> int:
    """Run the families, print a line for each, and write their entries of the table if there is no fault."""
    parser = argparse.ArgumentParser(prog="python -m areal.tests.zoo", description=__doc__)
    parser.add_argument("families", nargs="*", help="families to run, whose entries are replaced; default: all")
    names = parser.parse_args().families
    # Import before the processes are forked.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    engine_class("fsdp")
    findings = {}
    for family in names or FAMILIES:
        start = time.monotonic()
        findings[family] = finding = _isolated(family)
        print(f"{family:28} {finding.verdict:9} {time.monotonic() - start:5.1f} s  {finding.why}", flush=True)
    counts = collections.Counter(finding.verdict for finding in findings.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    faults = [family for family, finding in findings.items() if finding.verdict in FAULTS]
    if faults:
        print(f"faults of the engine: {', '.join(faults)}")
    else:
        table.write(table.read()[1] | findings if names else findings)
        print(f"wrote {table.FILE.name} and {table.PAGE.name}")
    return 1 if faults else 0


def _isolated(family: str) -> Finding:
    """Examine a family in a forked process, which is killed after the time limit."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(family, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        finding: Finding = (
            ours.recv() if ours.poll(TIME_LIMIT) else Finding("error", f"no end after {TIME_LIMIT:.0f} s")
        )
        return finding
    except EOFError:
        return Finding("error", "the process died")
    finally:
        child.kill()
        child.join()


def _send(family: str, connection: Connection) -> None:
    # Warnings of modeling code would interrupt the table.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    connection.send(examine(family))


if __name__ == "__main__":
    sys.exit(main())
