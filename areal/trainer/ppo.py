"""Policy optimisation on rollouts: PPO with a critic, GRPO and its variants without one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from areal.api import Finished, Metric, Pending, SaveLoadMeta, Stateful, TrainEngine
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.estimators import Estimator, GroupRelative, Sample, check_estimator, group_tokens
from areal.trainer.losses import Objective
from areal.trainer.mismatch import mismatch
from areal.trainer.monitoring import StepProfile, StepTimer, reduce_metrics, step_metrics
from areal.trainer.reference import check_reference, check_same_shards, start_reference
from areal.trainer.rollout.exchange import RolloutExchange, set_runner_state
from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.report import RolloutReport
from areal.trainer.rollout.runner import Runner
from areal.trainer.rollout.sampling_check import SamplingCheck
from areal.trainer.rollout.weights_check import WeightsCheck
from areal.trainer.trackers import Tracker, Trackers
from areal.trainer.updates import Updates
from areal.utils.data.sequences import ROUTED_EXPERTS
from areal.utils.seeding import mixed

logger = logging.getLogger(__name__)

Inspect = Callable[[int, list[Sample]], object]
"""Looks at the scored samples of this rank before the updates of a step. Gets the number of the step, from 1."""

Sync = Callable[[TrainEngine, int], object]
"""Sends weights, with their version, to the rollout engine; ``transport.send`` is one. Collective."""


@dataclass(frozen=True)
class Critic:
    """A value function, trained on the same batches as the policy.

    Attributes:
        engine: initialized, with a value head, on the policy's data-parallel layout.
        objective: value loss; reads ``returns`` and ``old_values``.
    """

    engine: TrainEngine
    objective: Objective


class PPOOptions(TypedDict, total=False):
    """Options of :class:`PPOTrainer` that its factories pass on."""

    estimator: Estimator | None
    critic: Critic | None
    updates: Updates | None
    tracker: Tracker | None
    checkpoints: Checkpoints | None
    profile: str | Path | None
    inspect: Inspect | None


class PPOTrainer:
    """Repeats four phases: rollout, advantage estimation, updates, and sending the new weights to the rollout engine.

    The constructor is collective over the world, like the methods.

    Args:
        engine: the policy, initialized.
        objective: loss to minimise, such as :func:`~areal.trainer.losses.grpo_objective`.
        runner: runs episodes. Every rank with a client runs some of the groups of a batch; the trainer sets the runner's ``rank`` and
            ``size``. A rank without a client trains on groups of others.
        sync: sends weights to the runner's rollout engine.
        estimator: computes advantages. Default :class:`~areal.trainer.estimators.GroupRelative`.
        reference: adds ``ref_logprobs``, for objectives and estimators that read them. On the policy's data-parallel layout. With adapters it
            may be the engine itself: its model without them is the reference.
        critic: adds ``old_values``, and is trained too.
        updates: optimizer steps per batch.
        tracker: receives scalars after each step.
        checkpoints: schedule and directory of checkpoints.
        profile: directory for a profile of the second step's updates, with the policy's phases.
        inspect: called with the scored samples of each batch, such as to write some to a file.

    Attributes:
        step: number of batches trained on.

    Raises:
        ValueError: engines are on different data-parallel layouts, the objective needs log-probs that ``updates`` does not compute, the
            estimator is none, the runners' ``rank`` and ``size`` do not fit the world, or no runner has a client.
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
        inspect: Inspect | None = None,
    ) -> None:
        # All engines take the same samples on this rank.
        if critic is not None:
            check_same_shards(engine, critic.engine)
        if reference is not None:
            check_reference(engine, reference)
        self.engine, self.objective, self.runner, self.sync = engine, objective, runner, sync
        self.estimator = estimator or GroupRelative()
        check_estimator(self.estimator)
        self.reference, self.critic = reference, critic
        self.updates = updates or Updates()
        if not self.updates.recompute_logprobs and "old_logprobs" in objective.recomputed:
            raise ValueError(
                "Updates.recompute_logprobs = False: the objective's MismatchCorrection would compare the rollout's log-probs with themselves: "
                "set it to True, or with one update per batch take PPOClip(old='logprobs') and MismatchCorrection(trainer='logprobs')"
            )
        self.step = self._empty_steps = 0
        # Version that the rollout engine has; None before the first sync.
        self._synced: int | None = None
        self._first_version = engine.version
        self._tracker = tracker or Trackers(())
        self._checkpoints = checkpoints
        self._profile = StepProfile(profile)
        self._inspect = inspect
        self._warns = engine.is_main and engine.dp_rank == 0  # one rank speaks for all
        self._check_sampling = SamplingCheck(
            engine.config,
            recompute_logprobs=self.updates.recompute_logprobs,
            warns=self._warns,
        )
        self._check_rollout_weights = WeightsCheck(self.updates.max_error_growth)
        self._exchange = RolloutExchange(runner, engine.dp_rank)

    # ---- the run

    def train(self, steps: int, *, after_step: Callable[[dict[str, float]], bool | None] | None = None) -> None:
        """Train until ``steps`` batches are trained on, earlier ones included. Collective over the world.

        Args:
            steps: total number of batches.
            after_step: called with each step's scalars. Returning False, on all ranks alike, ends the run.

        Raises:
            RuntimeError: every episode of a batch failed; the message has the first error.
        """
        # The rollout engine may have older weights, or none: before the first step and after a resume.
        self.send_weights()
        self.runner.advance(self.step)
        while self.step < steps:
            scalars = self.take_step()
            self._tracker.log(self.step, scalars)
            if self._checkpoints is not None:
                self._checkpoints.save_if_due(self.engines(), self.step, self.stateful())
            if after_step is not None and after_step(scalars) is False:
                return

    def take_step(self) -> dict[str, float]:
        """Train on one batch. Returns the logged scalars, equal on all ranks except ``time/...``. Collective over the world."""
        timer = StepTimer()
        # 1. Rollouts of this data-parallel coordinate, and statistics over the global batch.
        groups = self._exchange.next_groups()
        report = RolloutReport(
            groups,
            self.updates.max_tokens,
            self.engine.version,
            skip_flat=self.updates.skip_flat,
            mask_truncated=self.updates.mask_truncated,
            max_failed_share=self.runner.plan.max_failed_share,
            max_staleness=self.runner.plan.max_staleness,
            skip_stale=self.runner.plan.partial_answers,
            temperature=self.engine.config.temperature,
        )
        scalars = report.reduce(self.engine.global_sum, self._exchange.gather)
        self._check_sampling(report.samplings)
        timer.lap("wait")
        # 2. Everything that the objective reads.
        samples = self.score(report.samples, report.untrained)
        # A copy of the rollout's log-probs says nothing about the trainer.
        if self.updates.recompute_logprobs:
            scalars |= mismatch(self.engine, samples, unreplayed=self.updates.unreplayed)
            self._check_rollout_weights(scalars, lambda: any(self._exchange.gather(self._check_sampling.excluded)))
        if self._inspect is not None:
            self._inspect(self.step + 1, samples)
        timer.lap("score")
        # 3. Optimizer steps.
        with self._profile.step(self.engine):
            updates = [self._update(minibatch) for minibatch in self._minibatches(groups, samples)]
        self._check_trained(updates)
        scalars |= reduce_metrics(updates)
        timer.lap("update")
        # 4. New weights to the rollout engine, which lets the runner start further groups.
        self.step += 1
        self.engine.set_version(self.engine.version + 1)
        self.send_weights()
        self.runner.advance(self.step)
        timer.lap("sync")
        return scalars | timer.scalars()

    def send_weights(self) -> None:
        """Send the policy's weights to the rollout engine, unless it has them. Collective."""
        if self._synced != self.engine.version:
            self.sync(self.engine, self.engine.version)
            self._synced = self.engine.version

    def score(self, samples: list[Sample], untrained: Sequence[Sample] = ()) -> list[Sample]:
        """Return samples with ``old_logprobs``, ``ref_logprobs`` (with a reference), ``old_values`` (with a critic), and advantages.

        Collective over the world. A rank may be without samples. If all are, as with ``skip_flat`` and flat groups only, nothing is computed.

        Args:
            samples: samples to train on.
            untrained: samples that count in the baseline of their group only; see :class:`~areal.trainer.estimators.Estimator`.

        Raises:
            ValueError: samples have experts to replay, and there is a critic.
        """
        if self.critic is not None and any(ROUTED_EXPERTS in sample for sample in samples):
            raise ValueError("a critic cannot replay the routed_experts of the policy: make the rollout without them")
        if not self._sum_over_ranks(len(samples)):
            return []
        # What the objective and the estimator read of the models. Groups on separate devices compute at the same time. Their ranks receive
        # the samples once, for all models and updates.
        samples = self._put(samples)
        scores: dict[str, Pending[Any]] = {}
        if self.updates.recompute_logprobs:
            # The policy's log-probs before the update, against which ratios are taken.
            scores["old_logprobs"] = self.engine.start(TrainEngine.forward_batch, samples)
        else:
            scores["old_logprobs"] = Finished([sample["rollout_logprobs"] for sample in samples])
        if self.critic is not None:
            scores["old_values"] = self.critic.engine.start(TrainEngine.forward_batch, samples, outputs=("values",))
        # Last: without an engine of its own, it waits for the policy.
        if self.reference is not None:
            scores["ref_logprobs"] = start_reference(self.engine, self.reference, samples)
        for key, score in scores.items():
            samples = _with_key(samples, key, score.result())
        samples = _with_key(samples, "group_tokens", group_tokens(samples))
        # Last: an estimator may read all of the above.
        rest = untrained if getattr(self.estimator, "compares_groups", False) else ()
        return self._put(self.estimator([*samples, *rest], self.engine.global_sum))

    def _put(self, samples: list[Sample]) -> list[Sample]:
        """Return samples that are sent once to the ranks of all models."""
        for engine in self.engines().values():
            samples = engine.put(samples)
        return samples

    def _minibatches(self, groups: list[Group], samples: list[Sample]) -> Iterator[list[Sample]]:
        """Yield this rank's samples of each mini-batch, epoch after epoch. A mini-batch has the same groups on any layout."""
        plan, count = self.runner.plan, self.updates.minibatches
        for epoch in range(self.updates.epochs):
            # The first epoch is in the batch's order, and each later one in another, equal on all ranks.
            order = list(range(plan.groups))
            if epoch:
                generator = torch.Generator().manual_seed(mixed(plan.seed, self.step, epoch))
                order = torch.randperm(plan.groups, generator=generator).tolist()
            # By position in the global batch, so that the assignment does not depend on the rank that played a group.
            minibatch_of = {group.index: order[group.position] * count // plan.groups for group in groups}
            for index in range(count):
                yield [sample for sample in samples if minibatch_of[int(sample["group_ids"])] == index]

    def _update(self, minibatch: list[Sample]) -> dict[str, Metric]:
        """Take an optimizer step of policy and critic, unless no rank has a trained token. Returns their numbers."""
        metrics: dict[str, Metric] = {}
        # The critic trains on the same mini-batch, with its returns.
        jobs = [("actor", self.engine, self.objective)]
        if self.critic is not None:
            jobs.append(("critic", self.critic.engine, self.critic.objective))
        # All ranks skip together: a global weight of 0 would be an error. A rank alone may be without samples.
        if not self._sum_over_ranks(sum(int(sample["loss_mask"].count_nonzero()) for sample in minibatch)):
            return {"actor/empty": Metric(1.0, reduce="max")}
        # Groups on separate devices train at the same time.
        steps = [
            (name, engine.start(TrainEngine.train_batch, minibatch, objective)) for name, engine, objective in jobs
        ]
        for name, step in steps:
            metrics |= step_metrics(name, step.result())
        return metrics

    def _check_trained(self, updates: Sequence[dict[str, Metric]]) -> None:
        """Warn about the first batch without a trained token, and raise after too many in a row. Equal on all ranks."""
        self._empty_steps = self._empty_steps + 1 if all("actor/empty" in update for update in updates) else 0
        why = "all groups are flat, truncated or too long, or their episodes failed: see the metrics rollout/..."
        if self._empty_steps == 1 and self._warns:
            logger.warning("step %d trains on no token: %s", self.step + 1, why)
        limit = self.updates.max_empty_steps
        if limit is not None and self._empty_steps >= limit:
            raise RuntimeError(f"Updates.max_empty_steps = {limit} steps in a row trained on no token: {why}")

    def _sum_over_ranks(self, count: int) -> float:
        """Return the sum of a count over data-parallel ranks. Collective."""
        return self.engine.global_sum(torch.tensor(float(count))).item()

    # ---- state

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one. Collective. Call it before :meth:`train`, and after the engines were restarted.

        Without a checkpoint, a trainer whose engine was restarted begins again.

        Returns:
            Number of steps taken before.
        """
        found = None
        if self._checkpoints is not None:
            found = self._checkpoints.resume(self.engines(), self.stateful())
        if found is None and self._synced is not None and self.engine.version == self._first_version:
            self.load_state_dict({"step": 0, "runner": [Runner.NOTHING_PLAYED] * self.runner.size})
        # A transfer of weights may have been interrupted, which a comparison of versions would not show.
        self._synced = None
        return self.step

    def stateful(self) -> dict[str, Stateful]:
        """Return the state of the run besides the engines."""
        return {"trainer": self}

    def engines(self) -> dict[str, TrainEngine]:
        """Return the engines by the names of their checkpoints. The policy is last: the run's state is saved with the last one."""
        return ({"critic": self.critic.engine} if self.critic is not None else {}) | {"policy": self.engine}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, including rollouts not trained on yet. Collective; equal on all ranks."""
        return {"step": self.step, "runner": self._exchange.runner_state()} | self._check_rollout_weights.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, on the same or another number of ranks."""
        self.step = state["step"]
        self._check_rollout_weights.load_state_dict(state)
        set_runner_state(self.runner, state["runner"])

    def refresh_reference(self, folder: str | Path) -> None:
        """Copy the policy's current weights to the reference, through a checkpoint. Collective.

        Args:
            folder: directory for the weights, in Hugging Face format; the same on all ranks.

        Raises:
            RuntimeError: there is no reference, or it is the policy's base model, which adapters never change.
        """
        if self.reference is None or self.reference is self.engine:
            raise RuntimeError("there is no reference to refresh: pass reference= with an engine of its own")
        # Through files, because both engines may have different layouts.
        meta = SaveLoadMeta(folder, weight_format="hf")
        self.engine.save(meta)
        self.reference.load(meta)


def _with_key(samples: list[Sample], key: str, values: Any) -> list[Sample]:
    """Return copies of the samples with one more key."""
    return [sample | {key: value} for sample, value in zip(samples, values, strict=True)]
