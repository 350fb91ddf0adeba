"""Findings: one line of the report each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class State(Enum):
    """How a finding is marked."""

    FINE = "ok"
    NOTE = "note"
    ABSENT = "-"
    FAULT = "FAULT"


class Finding(NamedTuple):
    """A line of the report. For a fault, its text names the way out."""

    name: str
    state: State
    text: str


def print_section(title: str, findings: Sequence[Finding]) -> None:
    """Print findings under a title, at once."""
    width = max((len(finding.name) for finding in findings), default=0)
    print(title)
    for finding in findings:
        first, *further = finding.text.splitlines() or [""]
        print(f"  {finding.state.value:5}  {finding.name:{width}}  {first}")
        for line in further:
            print(" " * (11 + width) + line)
    print(flush=True)
