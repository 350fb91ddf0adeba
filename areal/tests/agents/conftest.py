"""Table of what agents sampled, printed at the end of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from areal.inference.gateway.recording import SampledSequence

ROWS: list[tuple[str, ...]] = [("agent", "episodes", "turns", "sampled tokens", "worst log-prob error")]


@pytest.fixture
def report() -> Callable[[str, int, Sequence[SampledSequence], float], None]:
    """Add a row to the table."""

    def row(name: str, episodes: int, sequences: Sequence[SampledSequence], error: float) -> None:
        answers = [segment for each in sequences for segment in each.segments if segment.trainable]
        tokens = sum(len(segment.tokens) for segment in answers)
        ROWS.append((name, str(episodes), str(len(answers)), str(tokens), f"{error:.1e}"))

    return row


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(ROWS) == 1:
        return
    widths = [max(len(row[i]) for row in ROWS) for i in range(len(ROWS[0]))]
    terminalreporter.section("agents by base_url")
    for row in ROWS:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line("  ".join(cells))
