"""Tracker of Weights & Biases. Needs the package wandb."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb


class WandB:
    """A :class:`~areal.trainer.trackers.Tracker` that writes to a run of Weights & Biases.

    A run that is resumed goes on under its id, which is kept in the file ``wandb-run-id`` of ``folder``. Without a server, or with
    ``mode="offline"``, numbers are written to ``folder``; ``wandb sync`` uploads them.

    Args:
        folder: directory of local files.
        config: settings to show with the run.
        options: arguments of ``wandb.init``, such as ``project``, ``name`` and ``mode``.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "wandb-run-id"
        if known.exists():
            options = {"id": known.read_text().strip(), "resume": "allow", **options}
        self._run = wandb.init(dir=str(folder), config=dict(config or {}), **options)
        known.write_text(self._run.id + "\n")
        # Steps are an own axis: those after a resume may lie before the last one that was logged.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of one step."""
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
