"""Runs rows in turn, one at a time, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from areal.utils.profiling import host_memory
from benchmarks.machine import gemm_rate
from benchmarks.reference import STEPS, Reference, reference
from benchmarks.row_processes import RowProcesses
from benchmarks.rows import RowSpec, Task
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Run:
    """Measurements of one interleaved run.

    Attributes:
        task: task of all rows, except for the ranks.
        gemm_rates: FLOP per CPU-second of a matrix product in the task's dtype, before each round.
        crowded: True if rows returned free memory after each turn, because not all of them fit in memory at once. Otherwise each
            keeps its memory, as a loop does; allocating new pages takes several per cent of a step.
        contestants: rows with their turns. The first forward and the steps that are compared are a warm-up, and are not timed.
    """

    task: Task
    workload: Workload
    matrix_parameters: int
    reference: Reference
    gemm_rates: list[float]
    crowded: bool
    contestants: list[RowProcesses]


def say(text: str) -> None:
    """Print the progress."""
    print(text, file=sys.stderr, flush=True)


def measure(
    task: Task,
    rows: Sequence[RowSpec],
    ranks: Sequence[int],
    rounds: int,
    matrix_parameters: int,
    folder: Path,
    cache: Path,
) -> Run:
    """Start a process for every row and rank, and run them in turn.

    After the warm-up follow ``rounds`` rounds of a step and a forward of every row, every second round in reverse order. A
    row that fails is dropped, and the others go on.

    Args:
        folder: directory for the output of the processes.
        cache: directory for the reference.

    Raises:
        ValueError: ``rounds`` is 0.
    """
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}: take at least 1")
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    say("reference: three steps in float64, one sequence at a time")
    exact = reference(task, cache)
    contestants = [
        RowProcesses(row, Task(**{**vars(task), "ranks": n}), folder)
        for n in ranks
        for row in rows
        if n == 1 or row.scales
    ]
    rates = []
    try:
        for contestant in contestants:
            contestant.start()
        for contestant in contestants:
            contestant.wait()
        for contestant in contestants:
            contestant.forward(give_back=True, save=True)
            for _ in range(STEPS - 1):
                contestant.step(give_back=True)
            say(f"{contestant.label}: {contestant.failure or 'ready'}")
        rise = sum(c.steps[-1].rise_mb * c.task.ranks for c in contestants if c.steps)
        crowded = rise > 0.8 * host_memory.available_bytes() / 2**20
        for contestant in contestants:
            contestant.step(give_back=crowded)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            rates.append(gemm_rate(getattr(torch, task.dtype)))
            for contestant in contestants if number % 2 == 0 else reversed(contestants):
                contestant.step(give_back=crowded)
                contestant.forward(give_back=crowded)
    finally:
        for contestant in contestants:
            contestant.quit()
    return Run(task, task.everything(), matrix_parameters, exact, rates, crowded, contestants)
