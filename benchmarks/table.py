"""Medians, spreads and ratios of a run, one row per contestant."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.driver import Run
from benchmarks.reference import STEPS
from benchmarks.row_processes import RowProcesses, Turn
from benchmarks.rows import CEILING

Kind = Literal["train", "forward"]

FLOP = {"train": 6, "forward": 2}
"""Floating-point operations per token and matrix parameter; attention is not counted."""


@dataclass(frozen=True)
class Spread:
    """Median over rounds, with the minimum and the maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of some numbers."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Entry:
    """One row of a table.

    Attributes:
        wrong: error in the row's numbers, or the reason why it did not run; such a row is without ratio.
        tokens_per_cpu_second: tokens of the workload; padding is not counted, a prompt counts once per response.
        ratio: ratio of that to the hand-written loop on as many ranks, of each round.
        wall_ratio: wall time of the same row on one rank over that on these.
        gemm_share: matrix-product FLOP of its tokens per CPU-second, over the measured rate of matrix products. Work that a row
            avoids is counted.
        peak_mb: largest resident memory of a rank, in the warm-up.
        rise_mb: the same, above the resident memory before the rank's first turn.
        losses: losses of the first steps.
        grad_norms: gradient norms of the first steps.
    """

    row: str
    ranks: int
    wrong: str | None
    tokens_per_cpu_second: Spread | None = None
    ratio: Spread | None = None
    wall_ratio: Spread | None = None
    gemm_share: float | None = None
    peak_mb: float | None = None
    rise_mb: float | None = None
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()


def entries(run: Run, kind: Kind) -> list[Entry]:
    """Return the rows of a table: by ranks, the fastest first, and last those that are wrong or did not run."""
    result = [
        _entry(run, contestant, kind) for contestant in run.contestants if kind == "train" or contestant.can_forward
    ]
    return sorted(result, key=lambda e: (e.ranks, e.wrong is not None, -e.ratio.median if e.ratio else 0.0))


def _turns(contestant: RowProcesses, kind: Kind) -> list[Turn]:
    """Return the timed turns."""
    return contestant.steps[STEPS:] if kind == "train" else contestant.forwards[1:]


def _wrong(run: Run, contestant: RowProcesses, kind: Kind) -> str | None:
    if contestant.failure is not None:
        return f"did not run: {contestant.failure}"
    if kind == "forward":
        if contestant.logprobs is None:
            return "did not run: it gave no log-probs"
        return run.reference.wrong_forward(contestant.logprobs, run.task.dtype)
    first = contestant.steps[:STEPS]
    return run.reference.wrong_step([t.loss for t in first], [t.grad_norm for t in first], run.task.dtype)


def _entry(run: Run, contestant: RowProcesses, kind: Kind) -> Entry:
    wrong = _wrong(run, contestant, kind)
    ranks = contestant.task.ranks
    if contestant.failure is not None:
        return Entry(contestant.label, ranks, wrong)
    turns = _turns(contestant, kind)
    # A turn that began with only the row's persistent memory.
    cold = contestant.steps[1] if kind == "train" else contestant.forwards[0]
    speeds = [run.workload.tokens / turn.cpu_seconds for turn in turns]
    gemm_share = FLOP[kind] * run.matrix_parameters * statistics.median(speeds) / statistics.median(run.gemm_rates)
    first = contestant.steps[:STEPS] if kind == "train" else []
    ceiling = next(c for c in run.contestants if c.spec.name == CEILING and c.task.ranks == ranks)
    alone = next((c for c in run.contestants if c.spec == contestant.spec and c.task.ranks == 1), None)
    return Entry(
        row=contestant.label,
        ranks=ranks,
        wrong=wrong,
        tokens_per_cpu_second=Spread.of(speeds),
        ratio=None if wrong else _ratio(ceiling, contestant, kind, "cpu_seconds"),
        wall_ratio=None if wrong or ranks == 1 or alone is None else _ratio(alone, contestant, kind, "wall_seconds"),
        gemm_share=gemm_share,
        peak_mb=cold.peak_mb,
        rise_mb=cold.rise_mb,
        losses=tuple(turn.loss for turn in first),
        grad_norms=tuple(turn.grad_norm for turn in first),
    )


def _ratio(base: RowProcesses, other: RowProcesses, kind: Kind, what: str) -> Spread | None:
    """Return the time of ``base`` over that of the row, round by round."""
    pairs = list(zip(_turns(base, kind), _turns(other, kind), strict=False))
    if base.failure is not None or not pairs:
        return None
    return Spread.of([getattr(a, what) / getattr(b, what) for a, b in pairs])
