"""Learning from data that is there: one objective, one loader, one optimizer step for each batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.api import StepOutput, TrainEngine
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.losses.objective import Objective
from areal.trainer.profiling import StepProfile
from areal.trainer.scalars import scalars_of
from areal.trainer.tracking import Tracker, Trackers
from areal.utils.data import ShardedLoader

Prepare = Callable[[Any], list[dict[str, Any]]]
"""From what the loader yields to the samples of a batch. Collective where it asks another engine."""


class SupervisedTrainer:
    """Trains an engine on the batches of a loader, epoch after epoch.

    Args:
        engine: initialized.
        objective: what is minimised.
        loader: of this data-parallel rank.
        prepare: makes samples of what it yields; by default they are samples already.
        tracker: gets ``train/...`` after each step.
        checkpoints: where to resume from, and what to leave.
        profile: folder for a profile of the second step.

    Attributes:
        step: optimizer steps that were taken.
    """

    def __init__(
        self,
        engine: TrainEngine,
        objective: Objective,
        loader: ShardedLoader,
        *,
        prepare: Prepare = list,
        tracker: Tracker | None = None,
        checkpoints: Checkpoints | None = None,
        profile: str | Path | None = None,
    ) -> None:
        self.engine = engine
        self.objective = objective
        self.step = 0
        self._loader = loader
        self._prepare = prepare
        self._tracker = tracker or Trackers(())
        self._checkpoints = checkpoints
        self._profile = StepProfile(profile)

    def resume(self) -> int:
        """Go on from the newest checkpoint, if there is one. Collective.

        Returns:
            The steps that were taken before.
        """
        if self._checkpoints is not None:
            self.step = self._checkpoints.resume({"model": self.engine}, {"loader": self._loader}) or 0
        return self.step

    def train(self, steps: int, *, after_step: Callable[[StepOutput], bool | None] | None = None) -> None:
        """Train until ``steps`` were taken. Collective.

        Args:
            after_step: called with each step; the run ends where it returns False, which it must on all ranks alike.
        """
        while self.step < steps:
            for batch in self._loader:
                done = self._take_step(self._prepare(batch))
                told_to_stop = after_step is not None and after_step(done) is False
                if told_to_stop or self.step == steps:
                    return

    def _take_step(self, batch: list[dict[str, Any]]) -> StepOutput:
        with self._profile.step(self.engine):
            done = self.engine.train_batch(
                batch, self.objective.loss_fn, self.objective.weight_fn, outputs=self.objective.outputs
            )
        self.step += 1
        self._tracker.log(self.step, scalars_of("train", done))
        if self._checkpoints is not None:
            self._checkpoints.save_if_due({"model": self.engine}, self.step, {"loader": self._loader})
        return done

    def evaluate(self, samples: list[dict[str, Any]]) -> StepOutput:
        """The objective on this data-parallel rank's samples, nothing trained. Collective."""
        return self.engine.eval_batch(
            samples, self.objective.loss_fn, self.objective.weight_fn, outputs=self.objective.outputs
        )
