"""Compares a training step and a forward with plain loops on the same data and weights, in one interleaved run per workload.

python -m benchmarks --workload rl --prompts 2 --rows areal 'head where trained'
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tyro

from benchmarks.driver import measure
from benchmarks.model import Size, write_model
from benchmarks.report import put_into, summary, write
from benchmarks.rows import DType, Task, choose
from benchmarks.workloads import MAKERS, load


@dataclass(frozen=True)
class Settings:
    """Command-line options."""

    workload: tuple[str, ...] = ("ragged",)
    """`ragged`, `rl`, the path of an .npz file of the same form, or `all` for both."""
    prompts: int | None = None
    """Number of prompts (groups) to take from the workload, for a short run."""
    rows: tuple[str, ...] = ()
    """Substrings of row names; other rows are skipped. Empty for all rows. The hand-written loop always runs."""
    peers: bool = False
    """Add TRL, verl and torchtitan, if `python -m benchmarks.peers.install` installed them."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of data-parallel ranks. Rows that support one rank only are skipped for the others."""
    rounds: int = 5
    """Number of timed rounds, after a warm-up."""
    dtype: DType = "float32"
    """Dtype of the compute."""
    output: Path = Path("runs/bench")
    """Output directory for tables, JSON, pictures, and the output of the rows."""
    docs: Path | None = None
    """Page of the docs whose table of the workload is replaced: see `benchmarks.report.put_into`."""
    hidden: int = 256
    """Width of the model."""
    layers: int = 4
    """Number of layers of the model."""


def main(settings: Settings) -> None:
    """Run the benchmark."""
    rows = choose(settings.rows, settings.peers)
    names = tuple(MAKERS) if settings.workload == ("all",) else settings.workload
    if 1 not in settings.ranks or min(settings.ranks) < 1:
        raise ValueError(f"ranks = {settings.ranks}: what several ranks are worth is told against one; add 1")
    for name in names:
        size = Size(settings.hidden, settings.layers, load(name).vocabulary)
        model = settings.output / f"model-{size.hidden}x{size.layers}-{size.vocabulary}"
        write_model(model, size)
        task = Task(workload=name, prompts=settings.prompts, model=str(model.absolute()), dtype=settings.dtype)
        task.everything()  # raises on a malformed file before any process is started
        stem = settings.output / f"{Path(name).stem}{'-peers' if settings.peers else ''}-{settings.dtype}"
        run = measure(
            task,
            rows,
            settings.ranks,
            settings.rounds,
            size.matrix_parameters,
            settings.output / "logs",
            settings.output,
        )
        write(run, stem)
        if settings.docs is not None:
            put_into(settings.docs, Path(name).stem, summary(run, date.today()))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
