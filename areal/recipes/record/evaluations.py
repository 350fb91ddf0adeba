"""The rewards of each held-out row, so that evaluations can be compared row by row: before and after, or with those of another run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

EVALUATIONS = "evaluations.jsonl"
"""File of the rewards of all evaluations, in the directory of a run."""


def add_evaluation(folder: Path, step: int, rewards: Sequence[Sequence[float]]) -> None:
    """Append an evaluation.

    Args:
        folder: directory of the run.
        step: number of steps taken.
        rewards: of the episodes of each row, in the order of the rows.
    """
    with (folder / EVALUATIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "rewards": rewards}) + "\n")


def read_evaluations(folder: Path) -> dict[int, list[list[float]]]:
    """Return the rewards of each evaluation by its step; the last ones of a step that was evaluated again after a resume."""
    evaluations = {}
    for line in (folder / EVALUATIONS).read_text(encoding="utf-8").splitlines():
        # A run that was killed may have left half a line.
        with contextlib.suppress(ValueError):
            each = json.loads(line)
            evaluations[int(each["step"])] = each["rewards"]
    return evaluations
