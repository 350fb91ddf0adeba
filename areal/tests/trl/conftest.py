"""Table of measured differences, printed at the end of a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from areal.tests.trl.curves import COLUMNS, Curve, differences

ROWS: list[tuple[str, ...]] = []


@pytest.fixture
def compare() -> Callable[[str, Curve, Curve], dict[str, float]]:
    """Return the largest differences between a run of TRL and one of this package, and add a row to the table."""

    def row(name: str, trl: Curve, ours: Curve) -> dict[str, float]:
        found = differences(trl, ours)
        ROWS.append((name, str(len(trl.logs)), *(f"{found[column]:.1e}".replace("0.0e+00", "0") for column in COLUMNS)))
        return found

    return row


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ROWS:
        return
    table = [("largest difference to TRL", "steps", *COLUMNS), *ROWS]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    terminalreporter.section("comparison with TRL")
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line("  ".join(cells))
