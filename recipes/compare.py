"""Compare runs: their first and last evaluation, the significance of the rise, and one picture of all curves.

    python recipes/compare.py runs/arithmetic/seed-0 runs/arithmetic/seed-1 --picture curves.png
    python recipes/compare.py runs/arithmetic/grpo --max-p-value 0.01

The exit code is 1 if a condition is not met by every run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import tyro
from matplotlib.figure import Figure

from areal.recipes.record.evaluations import EVALUATIONS, read_evaluations
from areal.trainer.trackers import read_metrics

EVALUATED = ("eval/reward", "eval/preference/accuracy", "eval/loss")
"""The number of an evaluation that is compared: the first that a run has."""
TRAINED = ("rollout/reward", "train/loss")


def main(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    picture: Path | None = None,
    max_p_value: float | None = None,
    min_p_value: float | None = None,
    max_loss_ratio: float | None = None,
) -> int:
    """Print a line for each run.

    Args:
        runs: directories of runs.
        picture: file to draw.
        max_p_value: fail unless the reward rises with a smaller p-value.
        min_p_value: fail if the reward rises with a smaller p-value: for controls.
        max_loss_ratio: fail unless the last loss of the evaluation is at most this part of the first.
    """
    failed = False
    for run in runs:
        name, values = evaluations(run)
        first, last = values[min(values)], values[max(values)]
        line = f"{run}: {name} {first:.3f} -> {last:.3f}"
        if (run / EVALUATIONS).exists():
            rewards = read_evaluations(run)
            before, after = (list(map(fmean, rewards[step])) for step in (min(rewards), max(rewards)))
            p = p_value_of_rise(before, after)
            line += f" on {len(after)} rows, p = {p:.1g}"
            failed |= max_p_value is not None and not p < max_p_value
            failed |= min_p_value is not None and p < min_p_value
        if max_loss_ratio is not None:
            failed |= not last <= max_loss_ratio * first
        print(line)
    if picture is not None:
        draw(runs, picture)
    if failed:
        print("FAILED: a run does not meet the condition", file=sys.stderr)
    return int(failed)


def evaluations(run: Path) -> tuple[str, dict[int, float]]:
    """Return the name of the number that is compared, and its values by step.

    Raises:
        ValueError: the run has no evaluation.
    """
    steps = read_metrics(run / "metrics.jsonl")
    for name in EVALUATED:
        values = {step: its[name] for step, its in steps.items() if name in its}
        if values:
            return name, values
    raise ValueError(f"{run} has no evaluation: set evaluation or held_out")


def p_value_of_rise(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the p-value of the exact one-sided sign test; of McNemar (1947) for rewards of 0 and 1.

    Under the null hypothesis, a row whose reward changed is equally likely to have risen or fallen, so that the number of those that rose is
    binomial with probability one half.

    Args:
        before: reward of each row, first time.
        after: reward of each row, second time.

    Returns:
        Probability that at least as many rows rise under the null hypothesis.
    """
    rose = sum(b < a for b, a in zip(before, after, strict=True))
    fell = sum(b > a for b, a in zip(before, after, strict=True))
    changed = rose + fell
    return sum(math.comb(changed, k) for k in range(rose, changed + 1)) / 2**changed


def draw(runs: Sequence[Path], path: Path) -> None:
    """Draw the curves of training and the evaluations of all runs."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run in runs:
        steps = read_metrics(run / "metrics.jsonl")
        name = next(name for name in TRAINED if any(name in its for its in steps.values()))
        points = [(step, its[name]) for step, its in sorted(steps.items()) if name in its]
        left.plot(*zip(*points, strict=True), linewidth=1.2, label=run.name)
        left.set(title=name, xlabel="step")
        evaluated, values = evaluations(run)
        right.plot(list(values), list(values.values()), "o-", markersize=3, linewidth=1.2, label=run.name)
        right.set(title=evaluated, xlabel="step")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
