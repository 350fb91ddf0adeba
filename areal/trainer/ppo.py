"""Policy optimisation on rollouts: PPO with a critic, GRPO and its relatives without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal.api import SaveLoadMeta, StepOutput, TensorSource, TrainEngine
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.checks import check_same_shards
from areal.trainer.estimators import Estimator, GroupRelative, Sample
from areal.trainer.losses import Objective
from areal.trainer.profiling import StepProfile
from areal.trainer.reference import check_reference, reference_logprobs
from areal.trainer.rollout.exchange import next_groups, runner_state, set_runner_state
from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.report import RolloutReport, disagreement
from areal.trainer.rollout.runner import Runner
from areal.trainer.scalars import StepTimer, mean_of, scalars_of
from areal.trainer.tracking import Tracker, Trackers

Sync = Callable[[TensorSource, int], object]
"""Brings weights, of the version that is named, to the rollout; such as ``transport.send``. Collective."""


@dataclass(frozen=True)
class Critic:
    """A value function that is trained beside the policy.

    Attributes:
        engine: initialized, with a value head, on the same data-parallel layout.
        objective: reads ``returns`` and ``old_values``.
    """

    engine: TrainEngine
    objective: Objective


@dataclass(frozen=True)
class Updates:
    """How a batch becomes optimizer steps: ``epochs * minibatches`` of them, each on the next part of the batch's groups.

    Attributes:
        recompute_logprobs: ``old_logprobs`` are the engine's own before the first step; else they are those of the rollout, which spares
            a forward pass and leaves its rounding (and staleness) in the ratio.
        max_tokens: sequences that are longer are left out, and counted; ``None`` for no limit.
        skip_flat: leave out groups whose rewards are all the same, once they are counted: compared with each other, they teach nothing, and
            cost as much as others. A penalty on the distance to a reference then does not see them either.

    Raises:
        ValueError: a number is out of its range.
    """

    epochs: int = 1
    minibatches: int = 1
    recompute_logprobs: bool = True
    max_tokens: int | None = None
    skip_flat: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Updates.{name} = {value}: it must be at least 1")


class PPOTrainer:
    """Rolls out, estimates advantages, updates, and brings the new weights to the rollout, again and again.

    Args:
        engine: the policy, initialized.
        objective: what is minimised, such as :func:`~areal.trainer.losses.grpo_objective`.
        runner: plays episodes; of the world's size, each rank with its own share.
        sync: brings weights to what the runner plays with.
        estimator: makes advantages.
        reference: adds ``ref_logprobs``, where the objective or the estimator reads them; same data-parallel layout. The engine itself,
            where it has adapters: its model without them.
        critic: adds ``old_values``, and learns.
        updates: how many optimizer steps.
        tracker: gets numbers after each step.
        checkpoints: where to resume from, and what to leave.
        profile: folder for a profile of the second step's updates, with the policy's phases.

    Attributes:
        step: batches that were trained on.

    Raises:
        ValueError: engines are on different data-parallel layouts.
    """

    def __init__(
        self,
        engine: TrainEngine,
        objective: Objective,
        runner: Runner,
        sync: Sync,
        *,
        estimator: Estimator | None = None,
        reference: TrainEngine | None = None,
        critic: Critic | None = None,
        updates: Updates | None = None,
        tracker: Tracker | None = None,
        checkpoints: Checkpoints | None = None,
        profile: str | Path | None = None,
    ) -> None:
        if critic is not None:
            check_same_shards(engine, critic.engine)
        if reference is not None:
            check_reference(engine, reference)
        self.engine, self.objective, self.runner, self.sync = engine, objective, runner, sync
        self.estimator = estimator or GroupRelative()
        self.reference, self.critic = reference, critic
        self.updates = updates or Updates()
        self.step = 0
        self._synced: int | None = None
        self._tracker = tracker or Trackers(())
        self._checkpoints = checkpoints
        self._profile = StepProfile(profile)

    # ---- the run

    def train(self, steps: int, *, after_step: Callable[[dict[str, float]], bool | None] | None = None) -> None:
        """Train on batches until there were ``steps``. Collective over the world.

        Args:
            after_step: called with the numbers of each step; the run ends where it returns False, which it must on all ranks alike.

        Raises:
            RuntimeError: every episode of a batch failed; names the first error.
        """
        if self._synced != self.engine.version:
            self._sync()
        while self.step < steps:
            scalars = self.take_step()
            self._tracker.log(self.step, scalars)
            if self._checkpoints is not None:
                self._checkpoints.save_if_due(self._engines(), self.step, {"trainer": self})
            if after_step is not None and after_step(scalars) is False:
                return

    def take_step(self) -> dict[str, float]:
        """One batch: play, score, update, sync. Returns what is logged; the same on every rank but for ``time/...``."""
        timer = StepTimer()
        groups = next_groups(self.runner, self.engine.dp_rank)
        report = RolloutReport(groups, self.updates.max_tokens, self.engine.version, skip_flat=self.updates.skip_flat)
        scalars = report.reduce(self.engine.global_sum)
        timer.lap("wait")
        samples = self.score(report.samples)
        scalars |= disagreement(samples, self.engine.global_sum)
        timer.lap("score")
        with self._profile.step(self.engine):
            scalars |= mean_of([self._update(part) for part in self._parts(groups, samples)])
        timer.lap("update")
        self.step += 1
        self.engine.set_version(self.engine.version + 1)
        self._sync()
        timer.lap("sync")
        return scalars | timer.scalars()

    def _sync(self) -> None:
        self.sync(self.engine, self.engine.version)
        self._synced = self.engine.version
        self.runner.advance(self.step)

    def score(self, samples: list[Sample]) -> list[Sample]:
        """Add what the objective reads: old log-probs, those of the reference, values, advantages."""
        if self.updates.recompute_logprobs:
            samples = _with(samples, "old_logprobs", self.engine.forward_batch(samples))
        else:
            samples = _with(samples, "old_logprobs", [sample["rollout_logprobs"] for sample in samples])
        if self.reference is not None:
            samples = _with(samples, "ref_logprobs", reference_logprobs(self.engine, self.reference, samples))
        if self.critic is not None:
            samples = _with(samples, "old_values", self.critic.engine.forward_batch(samples, outputs=("values",)))
        return self.estimator(samples, self.engine.global_sum)

    def _parts(self, groups: list[Group], samples: list[Sample]) -> Iterator[list[Sample]]:
        """Mini-batches, epoch after epoch: each holds the same groups on any layout."""
        parts = self.updates.minibatches
        of = {group.index: self.runner.place(group.index) * parts // self.runner.plan.groups for group in groups}
        for _ in range(self.updates.epochs):
            for part in range(parts):
                yield [sample for sample in samples if of[int(sample["group_ids"])] == part]

    def _update(self, part: list[Sample]) -> dict[str, float]:
        """One optimizer step of policy and critic; none where no rank has a token to train on."""
        scalars: dict[str, float] = {}
        jobs = [("actor", self.engine, self.objective)]
        if self.critic is not None:
            jobs.append(("critic", self.critic.engine, self.critic.objective))
        trained = torch.tensor(float(sum(int(sample["loss_mask"].count_nonzero()) for sample in part)))
        if not self.engine.global_sum(trained).item():
            return {"actor/empty": 1.0}
        for name, engine, objective in jobs:
            done: StepOutput = engine.train_batch(
                part, objective.loss_fn, objective.weight_fn, outputs=objective.outputs
            )
            scalars |= scalars_of(name, done)
        return scalars

    # ---- state

    def resume(self) -> int:
        """Go on from the newest checkpoint, if there is one. Collective. To be called before :meth:`train`.

        Returns:
            The steps that were taken before.
        """
        if self._checkpoints is not None:
            self._checkpoints.resume(self._engines(), {"trainer": self})
        return self.step

    def _engines(self) -> dict[str, TrainEngine]:
        """The policy last: the run's state is saved with it."""
        return ({"critic": self.critic.engine} if self.critic is not None else {}) | {"policy": self.engine}

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, rollouts that wait to be trained on included. Collective; the same on every rank."""
        return {"step": self.step, "runner": runner_state(self.runner)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.step = state["step"]
        set_runner_state(self.runner, state["runner"])

    def refresh_reference(self, folder: str | Path) -> None:
        """Make the policy's present weights the reference's, by way of a checkpoint. Collective.

        Args:
            folder: where the weights go, in the format of Hugging Face; the same on every rank.

        Raises:
            RuntimeError: there is no reference, or it is the policy's own model, which adapters never change.
        """
        if self.reference is None or self.reference is self.engine:
            raise RuntimeError("there is no reference to refresh: pass reference= with an engine of its own")
        meta = SaveLoadMeta(folder, weight_format="hf")
        self.engine.save(meta)
        self.reference.load(meta)


def _with(samples: list[Sample], key: str, values: Any) -> list[Sample]:
    return [sample | {key: value} for sample, value in zip(samples, values, strict=True)]
