"""Measures a training step and a forward beside plain loops, on the same data and weights, in one interleaved run for each workload.

python -m benchmarks --workload rl --prompts 2 --rows areal 'head where trained'
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.driver import measure
from benchmarks.model import Size, write_model
from benchmarks.report import write
from benchmarks.rows import DType, Task, choose
from benchmarks.workloads import MAKERS, load


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    workload: tuple[str, ...] = ("ragged",)
    """`ragged`, `rl`, the path of an .npz file of the same form, or `all` for the two."""
    prompts: int | None = None
    """Take so many prompts (groups) of the workload alone, for a quick look."""
    rows: tuple[str, ...] = ()
    """Parts of the names of rows, the others being left out; none takes all. The hand-written loop is always there."""
    peers: bool = False
    """Add TRL, verl and torchtitan, where `python -m benchmarks.peers.install` could install them."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of data-parallel ranks; rows that run on one rank alone are left out of the others."""
    rounds: int = 5
    """Times that every row is timed, after a warm-up."""
    dtype: DType = "float32"
    """Of the compute."""
    output: Path = Path("runs/bench")
    """Directory of tables, JSON, pictures, and what the rows printed."""
    hidden: int = 256
    """Width of the model."""
    layers: int = 4
    """Layers of the model."""


def main(settings: Settings) -> None:
    """Run it."""
    rows = choose(settings.rows, settings.peers)
    names = tuple(MAKERS) if settings.workload == ("all",) else settings.workload
    if 1 not in settings.ranks or min(settings.ranks) < 1:
        raise ValueError(f"ranks = {settings.ranks}: what several ranks are worth is told against one; add 1")
    for name in names:
        size = Size(settings.hidden, settings.layers, load(name).vocabulary)
        model = settings.output / f"model-{size.hidden}x{size.layers}-{size.vocabulary}"
        write_model(model, size)
        task = Task(workload=name, prompts=settings.prompts, model=str(model.absolute()), dtype=settings.dtype)
        task.everything()  # says what is wrong with it before anything is started
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


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
