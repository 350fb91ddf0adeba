"""Group-relative policy optimisation."""

from __future__ import annotations

from typing import Unpack

from areal.api import TrainEngine
from areal.trainer.losses import MismatchCorrection, Objective, grpo_objective
from areal.trainer.ppo import PPOOptions, PPOTrainer, Sync
from areal.trainer.rollout.runner import Runner
from areal.trainer.updates import Updates


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
            weights, it has a correction of the mismatch between rollout and trainer. Without ``recompute_logprobs`` the correction uses the
            log-probs of the update's own forward, which is possible for one update per batch.
        reference: model of the KL penalty; see :class:`~areal.trainer.ppo.PPOTrainer`.
        options: passed to :class:`~areal.trainer.ppo.PPOTrainer`.

    Raises:
        ValueError: ``group_size`` is 1; or weights may be stale, and there are several updates per batch without ``recompute_logprobs``.
    """
    if runner.plan.group_size < 2:
        raise ValueError(
            f"Plan.group_size = {runner.plan.group_size}: answers are compared within a group: play at least 2"
        )
    # Defaults for what the run has: a penalty with a reference, a correction for stale weights.
    if objective is None:
        kl_coef = 0.04 if reference is not None else 0.0
        updates = options.get("updates") or Updates()
        if not runner.plan.max_staleness:
            objective = grpo_objective(kl_coef=kl_coef)
        elif updates.recompute_logprobs:
            objective = grpo_objective(kl_coef=kl_coef, correction=MismatchCorrection())
        else:
            objective = _one_update_objective(runner.plan.max_staleness, updates, kl_coef)
    return PPOTrainer(engine, objective, runner, sync, reference=reference, **options)


def _one_update_objective(max_staleness: int, updates: Updates, kl_coef: float) -> Objective:
    """Return GRPO for one update per batch: its forward has the log-probs before the update, for the clip and for the correction.

    Raises:
        ValueError: ``updates`` has several updates, of which only the first begins with these log-probs.
    """
    if updates.epochs * updates.minibatches > 1:
        raise ValueError(
            f"Updates.recompute_logprobs = False with Plan.max_staleness = {max_staleness} and {updates.epochs * updates.minibatches} updates "
            "per batch: the correction of stale weights needs the log-probs before the first update: set recompute_logprobs=True, or pass "
            "an objective"
        )
    return grpo_objective(kl_coef=kl_coef, old="logprobs", correction=MismatchCorrection(trainer="logprobs"))
