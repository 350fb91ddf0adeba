"""Training on a fixed data set: one objective, one loader, one optimizer step per batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, Unpack

from areal.api import Stateful, StepOutput, TrainEngine
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.losses import Objective, sft_objective
from areal.trainer.monitoring import StepProfile, step_scalars
from areal.trainer.trackers import Tracker, Trackers
from areal.utils.data import ShardedLoader, where_trained

Prepare = Callable[[Any], list[dict[str, Any]]]
"""Converts an item of the loader to the samples of a batch. Collective if it calls another engine."""


class SupervisedOptions(TypedDict, total=False):
    """Options of :class:`SupervisedTrainer` that its factories pass on."""

    tracker: Tracker | None
    checkpoints: Checkpoints | None
    profile: str | Path | None


class SupervisedTrainer:
    """Trains an engine on the batches of a loader, epoch after epoch.

    Args:
        engine: initialized.
        objective: loss to minimise.
        loader: yields the batches of this data-parallel rank.
        prepare: converts an item of the loader to samples. By default the items are lists of samples.
        tracker: receives ``train/...`` after each step.
        checkpoints: schedule and directory of checkpoints.
        profile: directory for a profile of the second step.

    Attributes:
        step: number of optimizer steps taken.
        prepare: converts an item of the loader to samples.

    Raises:
        ValueError: ``loader`` has no state.
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
        if not isinstance(loader, Stateful):
            raise ValueError(
                f"loader is a {type(loader).__name__}, which has no state_dict: make it with areal.utils.data.sharded_loader, which divides "
                "the data over ranks and resumes"
            )
        self.engine = engine
        self.objective = objective
        self.step = 0
        self._loader, self._first_position = loader, loader.state_dict()
        self.prepare = prepare
        self._tracker = tracker or Trackers(())
        self._checkpoints = checkpoints
        self._profile = StepProfile(profile)

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one. Collective. Call it before :meth:`train`, and after the engine was restarted.

        Without a checkpoint the trainer begins again: the engine must have its first weights.

        Returns:
            Number of steps taken before.
        """
        found = None
        if self._checkpoints is not None:
            found = self._checkpoints.resume(self.engines(), self.stateful())
        if found is None:
            self._loader.load_state_dict(self._first_position)
        self.step = found or 0
        return self.step

    def train(self, steps: int, *, after_step: Callable[[StepOutput], bool | None] | None = None) -> None:
        """Train until ``steps`` optimizer steps are taken, earlier ones included. Collective.

        Args:
            steps: total number of steps.
            after_step: called with each step's output. Returning False, on all ranks alike, ends the run.
        """
        while self.step < steps:
            # One epoch; the loader continues in its middle after a resume.
            for batch in self._loader:
                output = self._take_step(self.prepare(batch))
                stop = after_step is not None and after_step(output) is False
                if stop or self.step == steps:
                    return

    def _take_step(self, batch: list[dict[str, Any]]) -> StepOutput:
        """Train on one batch, log, and save a checkpoint if one is due."""
        with self._profile.step(self.engine):
            output = self.engine.train_batch(batch, self.objective)
        self.step += 1
        self._tracker.log(self.step, step_scalars("train", output))
        if self._checkpoints is not None:
            self._checkpoints.save_if_due(self.engines(), self.step, self.stateful())
        return output

    def engines(self) -> dict[str, TrainEngine]:
        """Return the engines by the names of their checkpoints."""
        return {"model": self.engine}

    def stateful(self) -> dict[str, Stateful]:
        """Return the state of the run besides the engine."""
        return {"loader": self._loader}

    def evaluate(self, samples: list[dict[str, Any]]) -> StepOutput:
        """Return the objective on this data-parallel rank's samples, without training. Collective."""
        return self.engine.eval_batch(samples, self.objective)


def sft_trainer(
    engine: TrainEngine,
    loader: ShardedLoader,
    *,
    prepare: Prepare | None = None,
    **options: Unpack[SupervisedOptions],
) -> SupervisedTrainer:
    """Return a trainer that minimises the cross-entropy of tokens, weighted by ``loss_mask``.

    Args:
        engine: initialized.
        loader: yields lists of samples with ``input_ids`` and optionally ``loss_mask``; see :mod:`areal.utils.data.sequences`.
        prepare: converts an item of the loader to samples. The default restricts outputs to trained tokens.
        options: passed to :class:`SupervisedTrainer`.
    """
    return SupervisedTrainer(engine, sft_objective(), loader, prepare=prepare or _restrict_outputs, **options)


def _restrict_outputs(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute log-probs only at trained tokens, for samples with a mask."""
    return [where_trained(sample) if "loss_mask" in sample else sample for sample in samples]
