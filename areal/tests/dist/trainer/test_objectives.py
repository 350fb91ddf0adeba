"""Objectives in trainers and verbs: what an option of the trainer leaves unmeasured is absent, and a forgotten weight function is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from areal.api import Batch, OptimizerConfig, StepOutput, TensorSource, TokenOutputs, TrainEngine
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import started
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import (
    GroupTokenMean,
    MismatchCorrection,
    PPOClip,
    decoupled_ppo_objective,
    grpo_objective,
    policy_objective,
)
from areal.trainer.rollout.plan import Plan
from areal.trainer.updates import Updates

OPTIMIZER = OptimizerConfig(lr=8e-3, gradient_clipping=1.0, eps=1e-6)
STALE = Plan(groups=4, group_size=4, max_staleness=1, seed=3)


def policy(backend: str = "fsdp:d1", **changes: Any) -> Any:
    return started(backend, **{"path": model_dir("qwen3"), "optimizer": OPTIMIZER, **changes})


def trained(engine: TrainEngine, plan: Plan, steps: int, **options: Any) -> Curve:
    """Train on rollouts of the initial weights: stale in the same way in every run."""
    curve = Curve()
    with played(engine, replace(plan, max_staleness=steps)) as rollout:

        def sync_once(source: TensorSource, version: int) -> None:
            if version == 0:
                rollout.sync(source, version)

        grpo_trainer(engine, rollout.runner, sync_once, tracker=curve, **options).train(steps)
    return curve


@pytest.mark.world(1)
def test_correction_without_recomputed_logprobs_is_measured_in_the_update() -> None:
    """With one update per batch, its forward has the log-probs that the trainer would recompute: the run is the same."""
    curves = []
    for recompute in (True, False):
        with policy() as engine:
            curves.append(trained(engine, STALE, 4, updates=Updates(recompute_logprobs=recompute)))
    with_forward, without = curves
    assert max(without["actor/mismatch/k3"]) > 1e-5
    assert max(without["actor/mismatch/ratio_max"]) > 1.01
    names = ("actor/loss", "actor/grad_norm", "rollout/reward", "actor/mismatch/k3", "actor/mismatch/ratio_max")
    for name in names:
        assert without[name] == pytest.approx(with_forward[name], rel=1e-3, abs=1e-6), name
    # Without a forward before the update, its comparison with the rollout is absent.
    assert "rollout/logprob_error" in with_forward.steps[0]
    assert not {"rollout/logprob_error", "rollout/logprob_k3"} & {name for step in without.steps for name in step}


@pytest.mark.world(1)
def test_correction_of_rollout_logprobs_with_themselves_is_refused() -> None:
    blind = Updates(recompute_logprobs=False)
    with policy() as engine, played(engine, STALE) as rollout:
        for objective in (
            grpo_objective(kl_coef=0.0, correction=MismatchCorrection()),
            grpo_objective(kl_coef=0.0, correction=MismatchCorrection(trainer="logprobs")),
            decoupled_ppo_objective(),
        ):
            with pytest.raises(ValueError, match=r"recompute_logprobs = False.*PPOClip\(old='logprobs'\)"):
                grpo_trainer(engine, rollout.runner, rollout.sync, objective=objective, updates=blind)
        several = Updates(minibatches=2, recompute_logprobs=False)
        with pytest.raises(ValueError, match="max_staleness = 1 and 2 updates per batch"):
            grpo_trainer(engine, rollout.runner, rollout.sync, updates=several)
        # Without a correction, the ratio itself goes back to the rollout.
        grpo_trainer(engine, rollout.runner, rollout.sync, objective=grpo_objective(kl_coef=0.0), updates=blind)


def batch() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    return [
        {
            "input_ids": torch.randint(3, 90, (n,)),
            "loss_mask": torch.ones(n),
            "advantages": torch.full((n,), 1.0 + n / 10),
        }
        for n in (4, 12, 7)
    ]


@pytest.mark.world(1)
def test_verbs_take_an_objective() -> None:
    objective = grpo_objective(kl_coef=0.0, old="logprobs", report_entropy=True)
    spelled_out = (objective.loss_fn, objective.weight_fn)
    with policy() as engine:
        expected = engine.eval_batch(batch(), *spelled_out, outputs=objective.outputs)
        assert engine.eval_batch(batch(), objective).loss == expected.loss
        assert engine.forward_backward(batch(), objective).metrics == expected.metrics
        engine.zero_grad()
        assert engine.train_batch(batch(), objective).loss == pytest.approx(expected.loss, abs=1e-7)


@pytest.mark.world(1)
def test_a_forgotten_weight_function_or_output_is_refused_by_name() -> None:
    objective = grpo_objective(kl_coef=0.0, old="logprobs", report_entropy=True)
    with policy() as engine:
        for verb in (engine.train_batch, engine.eval_batch, engine.forward_backward):
            with pytest.raises(ValueError, match=r"loss_weight_fn is missing.*pass the objective"):
                verb(batch(), objective.loss_fn, outputs=objective.outputs)
            with pytest.raises(ValueError, match=r"loss_weight_fn = .* with an objective"):
                verb(batch(), objective, lambda b: b["loss_mask"].sum())
            with pytest.raises(ValueError, match="the objective reads"):
                verb(batch(), objective, outputs=("logprobs",))
        # A number as the denominator needs no weights.
        engine.forward_backward(batch(), objective.loss_fn, outputs=objective.outputs, normalization=3.0)
        engine.zero_grad()

        def entropy_bonus(outputs: TokenOutputs, mb: Batch) -> torch.Tensor:
            return (outputs.entropy * mb["loss_mask"] - outputs.logprobs).sum()

        with pytest.raises(ValueError, match=r"read the output 'entropy'.*pass outputs=\('logprobs', 'entropy'\)"):
            engine.train_batch(batch(), entropy_bonus)


@pytest.mark.world(1, 2)
def test_mini_batches_of_each_epoch_hold_other_groups_equal_on_any_layout(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers are combined by kind: tokens are added, and the largest ratio is the largest of all updates."""
    seen: list[set[int]] = []
    outputs: list[StepOutput] = []
    plan = Plan(groups=6, group_size=2, seed=4)
    objective = policy_objective(PPOClip(), GroupTokenMean())
    with policy(f"fsdp:d{world_size}") as engine:
        train_batch = engine.train_batch

        def recording(samples: list[Any], *call: Any) -> StepOutput:
            seen.append({int(sample["group_ids"]) for sample in samples})
            outputs.append(train_batch(samples, *call))
            return outputs[-1]

        monkeypatch.setattr(engine, "train_batch", recording)
        curve = trained(engine, plan, 1, objective=objective, updates=Updates(epochs=3, minibatches=2))
        of_ranks = engine.control.gather(seen)
    halves = [set().union(*ranks) for ranks in zip(*of_ranks, strict=True)]
    assert halves == [{0, 1, 2}, {3, 4, 5}, {0, 2, 3}, {1, 4, 5}, {0, 3, 5}, {1, 2, 4}]
    assert outputs[0].metrics["weight"] == pytest.approx(3), "the weight is the number of groups"
    assert curve["actor/n_tokens"][0] == sum(output.n_tokens for output in outputs)
    ratios = [output.metrics["policy/ratio_max"] for output in outputs]
    assert len(set(ratios)) > 1
    assert curve["actor/policy/ratio_max"][0] == max(ratios)


@pytest.mark.world(1)
def test_masked_answers_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[Any]] = []
    plan = Plan(groups=4, group_size=4, seed=3)
    with policy() as engine:
        train_batch = engine.train_batch

        def recording(samples: list[Any], *call: Any) -> StepOutput:
            batches.append(samples)
            return train_batch(samples, *call)

        monkeypatch.setattr(engine, "train_batch", recording)
        # Nearly every answer of this model is as long as it may be.
        masked = trained(engine, plan, 1, updates=Updates(mask_truncated=True))
        everything = trained(engine, plan, 1, updates=Updates())
    answers, complete = len(batches[-1]), sum(len(batch) for batch in batches[:-1])
    assert answers == 16
    assert complete == answers * (1 - masked["rollout/truncated"][0]) < answers
    assert masked["rollout/reward"] == everything["rollout/reward"]
