"""What a run tells its user: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class Report:
    """Writes to the standard output.

    Args:
        speaks: False on the ranks that keep silent.
    """

    def __init__(self, speaks: bool) -> None:
        self._console = Console(quiet=not speaks, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """Write a line; above the bar, where there is one."""
        self._console.print(text, markup=False)

    @contextmanager
    def progress(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        """A stretch of work of ``total`` steps, ``done`` of them before.

        Call what it yields after each step, with a few words on the step.
        """
        if not self._console.is_terminal:
            yield Advance(self, label, total, done)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=self._console) as bar:
            yield BarAdvance(self, label, total, done, bar)

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Write a table; all columns but the first are aligned to the right."""
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)


class Advance:
    """Counts steps and writes a line for each."""

    def __init__(self, report: Report, label: str, total: int, done: int) -> None:
        self._report, self._label, self._total, self._done = report, label, total, done

    def __call__(self, note: str) -> None:
        self._done += 1
        self._report.line(f"{self._label} {self._done}/{self._total}  {note}")


class BarAdvance(Advance):
    """Counts steps on a bar."""

    def __init__(self, report: Report, label: str, total: int, done: int, bar: Progress) -> None:
        super().__init__(report, label, total, done)
        self._bar = bar
        self._task = bar.add_task(label, total=total, completed=done, note="")

    def __call__(self, note: str) -> None:
        self._bar.update(self._task, advance=1, note=note)
