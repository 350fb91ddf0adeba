"""Group-relative policy optimisation."""

from __future__ import annotations

from typing import Any

from areal.api import TrainEngine
from areal.trainer.losses import MismatchCorrection, Objective, grpo_objective
from areal.trainer.ppo import PPOTrainer, Sync
from areal.trainer.rollout.runner import Runner


def grpo_trainer(
    engine: TrainEngine,
    runner: Runner,
    sync: Sync,
    *,
    objective: Objective | None = None,
    reference: TrainEngine | None = None,
    **options: Any,
) -> PPOTrainer:
    """A trainer of GRPO (Shao et al., 2024), or of a relative that compares the answers to one prompt with each other.

    Args:
        engine: the policy, initialized.
        runner: its plan has a ``group_size`` of at least 2.
        sync: brings weights to what the runner plays with.
        objective: :func:`~areal.trainer.losses.grpo_objective` by default, with a penalty on the distance to the reference where there is
            one, and corrected for weights that were older when they sampled where the runner's plan allows them.
        options: of :class:`~areal.trainer.ppo.PPOTrainer`.

    Raises:
        ValueError: groups of one have nothing to be compared with.
    """
    if runner.plan.group_size < 2:
        raise ValueError(
            f"Plan.group_size = {runner.plan.group_size}: answers are compared within a group: play at least 2"
        )
    if objective is None:
        correction = MismatchCorrection() if runner.plan.max_staleness else None
        objective = grpo_objective(kl_coef=0.04 if reference is not None else 0.0, correction=correction)
    return PPOTrainer(engine, objective, runner, sync, reference=reference, **options)
