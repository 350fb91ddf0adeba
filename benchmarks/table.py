"""Medians, spreads and ratios of a run, a row for each contestant."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.contestant import Contestant, Turn
from benchmarks.driver import Run
from benchmarks.reference import STEPS
from benchmarks.rows import CEILING

Kind = Literal["train", "forward"]

FLOP = {"train": 6, "forward": 2}
"""Floating-point operations for each token and parameter of a matrix; attention is not counted."""


@dataclass(frozen=True)
class Spread:
    """A median over rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some numbers."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Entry:
    """A row of a table.

    Attributes:
        wrong: what is wrong with its numbers, or why it did not run; it has no ratio then.
        tokens_per_cpu_second: tokens of the workload; padding is not counted, a prompt once for each response.
        ratio: of that to the hand-written loop on as many ranks, of each round.
        wall_ratio: wall time of the same row on one rank over that on these.
        gemm_share: what its tokens need as matrix products in a second of the CPU, over what the CPU did alone. Work that a row spares is
            counted all the same.
        peak_mb, rise_mb: largest resident memory of a rank, and that above what it had before its first turn, both in the warm-up.
        losses, grad_norms: of the first steps.
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
    """The rows of a table: by ranks, the fastest first, and last those that are wrong or did not run."""
    found = [
        _entry(run, contestant, kind) for contestant in run.contestants if kind == "train" or contestant.can_forward
    ]
    return sorted(found, key=lambda e: (e.ranks, e.wrong is not None, -e.ratio.median if e.ratio else 0.0))


def _turns(contestant: Contestant, kind: Kind) -> list[Turn]:
    """The turns that are timed."""
    return contestant.steps[STEPS:] if kind == "train" else contestant.forwards[1:]


def _wrong(run: Run, contestant: Contestant, kind: Kind) -> str | None:
    if contestant.failure is not None:
        return f"did not run: {contestant.failure}"
    if kind == "forward":
        if contestant.logprobs is None:
            return "did not run: it gave no log-probs"
        return run.reference.wrong_forward(contestant.logprobs, run.task.dtype)
    first = contestant.steps[:STEPS]
    return run.reference.wrong_step([t.loss for t in first], [t.grad_norm for t in first], run.task.dtype)


def _entry(run: Run, contestant: Contestant, kind: Kind) -> Entry:
    wrong = _wrong(run, contestant, kind)
    ranks = contestant.task.ranks
    if contestant.failure is not None:
        return Entry(contestant.label, ranks, wrong)
    turns = _turns(contestant, kind)
    # One that began with what the row has to hold, and no more.
    cold = contestant.steps[1] if kind == "train" else contestant.forwards[0]
    speeds = [run.workload.tokens / turn.cpu_seconds for turn in turns]
    share = FLOP[kind] * run.matrix_parameters * statistics.median(speeds) / statistics.median(run.gemm_rates)
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
        gemm_share=share,
        peak_mb=cold.peak_mb,
        rise_mb=cold.rise_mb,
        losses=tuple(turn.loss for turn in first),
        grad_norms=tuple(turn.grad_norm for turn in first),
    )


def _ratio(base: Contestant, other: Contestant, kind: Kind, what: str) -> Spread | None:
    """How many times as long ``base`` took, round by round."""
    pairs = list(zip(_turns(base, kind), _turns(other, kind), strict=False))
    if base.failure is not None or not pairs:
        return None
    return Spread.of([getattr(a, what) / getattr(b, what) for a, b in pairs])
