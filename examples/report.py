"""Console output of a run: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class Report:
    """Writes to the standard output.

    Args:
        enabled: False on ranks without output.
    """

    def __init__(self, enabled: bool) -> None:
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """Write a line, above the progress bar if there is one."""
        self._console.print(text, markup=False)

    @contextmanager
    def progress(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Show the progress of ``total`` steps, of which ``done`` were taken before.

        Yields a function to call after each step, with a short note about the step.
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
    """Counts steps on a progress bar."""

    def __init__(self, report: Report, label: str, total: int, done: int, bar: Progress) -> None:
        super().__init__(report, label, total, done)
        self._bar = bar
        self._task = bar.add_task(label, total=total, completed=done, note="")

    def __call__(self, note: str) -> None:
        self._bar.update(self._task, advance=1, note=note)
