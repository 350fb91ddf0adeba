"""Group-relative policy optimisation."""

from __future__ import annotations

from typing import Unpack

from areal.api import TrainEngine
from areal.trainer.losses import MismatchCorrection, Objective, grpo_objective
from areal.trainer.ppo import PPOOptions, PPOTrainer, Sync
from areal.trainer.rollout.runner import Runner


def grpo_trainer(
    engine: TrainEngine,
    runner: Runner,
    sync: Sync,
    *,
    objective: Objective | None = None,
    reference: TrainEngine | None = None,
    **options: Unpack[PPOOptions],
) -> PPOTrainer:
    """Return a trainer of GRPO (Shao et al., 2024), or of a variant that compares the answers to one prompt with each other.

    Args:
        engine: the policy, initialized.
        runner: its plan has a ``group_size`` of at least 2.
        sync: sends weights to the runner's rollout engine.
        objective: default :func:`~areal.trainer.losses.grpo_objective`. With a reference it has a KL penalty. If the plan allows stale
            weights, it has a correction of the mismatch between rollout and trainer.
        reference: model of the KL penalty; see :class:`~areal.trainer.ppo.PPOTrainer`.
        options: passed to :class:`~areal.trainer.ppo.PPOTrainer`.

    Raises:
        ValueError: ``group_size`` is 1.
    """
    if runner.plan.group_size < 2:
        raise ValueError(
            f"Plan.group_size = {runner.plan.group_size}: answers are compared within a group: play at least 2"
        )
    # Defaults for what the run has: a penalty with a reference, a correction for stale weights.
    if objective is None:
        correction = MismatchCorrection() if runner.plan.max_staleness else None
        objective = grpo_objective(kl_coef=0.04 if reference is not None else 0.0, correction=correction)
    return PPOTrainer(engine, objective, runner, sync, reference=reference, **options)
