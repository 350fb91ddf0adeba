"""Bugs of losses, step settings, advantages and their use in trainers that the suite must catch.

As in :mod:`areal.tests.mutants.bugs.step`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from areal.api import Batch
from areal.api.loss import LossObjective
from areal.tests.mutants.planting import Function, mutant

FORMULA = "unit/losses/test_formulas.py::test_loss_and_gradient_equal_formula[{}]"
ADVANTAGE = "unit/losses/test_formulas.py::test_advantage_equals_formula[{}]"
ESTIMATORS = "unit/trainer/test_estimators.py::test_{}"
OBJECTIVES = "dist/trainer/test_objectives.py::test_{}[w1]"


@mutant(
    "areal.trainer.losses.mismatch:MismatchCorrection.__call__",
    FORMULA.format("correction token truncate 2.0"),
    OBJECTIVES.format("correction_without_recomputed_logprobs_is_measured_in_the_update"),
)
def rollout_is_compared_with_itself(right: Function) -> Function:
    """The correction of the mismatch is 1, and its metrics say that there is none."""

    def wrong(self: Any, logprobs: Any, batch: Batch) -> Any:
        same = Batch({**batch, "old_logprobs": batch["rollout_logprobs"]}, batch.cu_seqlens)
        return right(dataclasses.replace(self, trainer="old_logprobs"), logprobs, same)

    return wrong


@mutant(
    "areal.trainer.losses.objective:policy_objective",
    OBJECTIVES.format("correction_of_rollout_logprobs_with_themselves_is_refused"),
)
def correction_takes_any_logprobs(right: Function) -> Function:
    """An objective does not say that its correction needs the trainer's own log-probs."""
    return lambda *args, **options: dataclasses.replace(right(*args, **options), recomputed=frozenset())


@mutant(
    "areal.trainer.ppo:PPOTrainer.take_step",
    OBJECTIVES.format("correction_without_recomputed_logprobs_is_measured_in_the_update"),
)
def unmeasured_is_zero(right: Function) -> Function:
    """A trainer that did not compare log-probs reports that they are equal."""
    return lambda self: {"rollout/logprob_error": 0.0, "rollout/logprob_k3": 0.0} | right(self)


@mutant("areal.engine.loss_call:resolve_loss", OBJECTIVES.format("verbs_take_an_objective"))
def weight_function_of_objective_is_forgotten(right: Function) -> Function:
    """A verb takes the loss function and the outputs of an objective, and divides by the number of tokens."""

    def wrong(loss: Any, weight_fn: Any, outputs: Any, normalization: Any = "weight") -> Any:
        if not isinstance(loss, LossObjective):
            return right(loss, weight_fn, outputs, normalization)
        return right(lambda *given: loss.loss_fn(*given), weight_fn, loss.outputs, normalization)

    return wrong


@mutant(
    "areal.engine.loss_call:resolve_loss",
    OBJECTIVES.format("a_forgotten_weight_function_or_output_is_refused_by_name"),
)
def loss_alone_is_accepted(right: Function) -> Function:
    """A verb takes the loss function of an objective without its weight function."""
    return lambda loss, weight_fn, outputs, normalization="weight": right(loss, weight_fn, outputs, "sum")


@mutant(
    "areal.trainer.monitoring:reduce_metrics",
    ESTIMATORS.format("numbers_of_several_updates_are_combined_as_declared"),
    OBJECTIVES.format("mini_batches_of_each_epoch_hold_other_groups_equal_on_any_layout"),
)
def maxima_are_averaged(right: Function) -> Function:
    """Every number of several updates is logged as a mean."""

    def wrong(steps: Any) -> Any:
        return right([{name: dataclasses.replace(m, reduce="mean") for name, m in step.items()} for step in steps])

    return wrong


@mutant(
    "areal.trainer.advantages.groups:_number_episodes",
    ESTIMATORS.format("branches_of_an_episode_count_once_in_the_baseline"),
    "unit/trainer/test_advantages_groups.py::test_an_episode_with_many_sequences_counts_once",
)
def every_sequence_is_an_episode(right: Function) -> Function:
    """An episode with many sequences weighs more in the baseline of its group."""
    return lambda group_ids, episode_ids: None


@mutant(
    "areal.trainer.losses.preference:sequence_log_ratios",
    FORMULA.format("ipo"),
    "unit/losses/test_losses_preference.py::test_dpo_and_ipo_are_means_over_trained_pairs",
)
def ipo_of_sums(right: Function) -> Function:
    """The log-ratios of IPO are sums over tokens."""
    return lambda *args, average=False: right(*args)


@mutant(
    "areal.trainer.rollout.report:RolloutReport.__init__",
    ESTIMATORS.format("untrained_answers_stay_in_the_baseline_of_their_group"),
)
def untrained_answers_leave_the_baseline(right: Function) -> Function:
    """An answer that is too long to train on does not count in the baseline of its group."""

    def wrong(self: Any, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        self.untrained = []

    return wrong


@mutant(
    "areal.trainer.ppo:PPOTrainer._minibatches",
    OBJECTIVES.format("mini_batches_of_each_epoch_hold_other_groups_equal_on_any_layout"),
)
def epochs_repeat_their_mini_batches(right: Function) -> Function:
    """Each epoch has the mini-batches of the first."""

    def wrong(self: Any, *args: Any) -> Any:
        first = list(itertools.islice(right(self, *args), self.updates.minibatches))
        return iter(first * self.updates.epochs)

    return wrong


@mutant("areal.trainer.losses.policy:clipped_loss", FORMULA.format("clip higher"), FORMULA.format("gspo"))
def clip_bounds_are_swapped(right: Function) -> Function:
    """The lower bound of the ratio is used above 1, and the upper one below."""

    def wrong(log_ratios: Any, advantages: Any, *, clip_low: float, clip_high: float, dual_clip: Any = None) -> Any:
        return right(log_ratios, advantages, clip_low=clip_high, clip_high=clip_low, dual_clip=dual_clip)

    return wrong


@mutant("areal.trainer.losses.kl:KLTerm.per_token", FORMULA.format("k3"), FORMULA.format("k1 weighted"))
def penalty_has_no_gradient(right: Function) -> Function:
    """The value of the KL penalty is right, and its gradient is 0."""
    return lambda *args: right(*args).detach()


@mutant("areal.trainer.advantages.group_relative:rloo", ADVANTAGE.format("rloo"))
def own_reward_is_in_the_baseline(right: Function) -> Function:
    """The baseline of RLOO is the mean of the entire group."""

    def wrong(rewards: Any, groups: Any) -> Any:
        return groups.deviations(rewards)[0]

    return wrong


SETTINGS = "dist/step/test_step_settings.py::test_twenty_steps_with_changing_settings_track_the_reference[{}]"


@mutant(
    "areal.engine.optimizer:ClippingOptimizer._in_groups",
    SETTINGS.format("fsdp:d1-qwen3-nll-ragged-tokens24-plain-float64"),
    SETTINGS.format("megatron:d2-qwen3-nll-ragged-tokens24-plain-float32"),
)
def settings_leak_into_the_next_step(right: Function) -> Function:
    """Settings of one step stay in the parameter groups."""

    def wrong(self: Any, settings: Any) -> Any:
        for group in self.inner.param_groups:
            group.update(settings)
        return right(self, settings)

    return wrong


RETURNS = "dist/step/test_outputs.py::test_step_returns_outputs_without_changing_the_gradient[{}]"


@mutant("areal.engine.loss_step:LossStep.__call__", RETURNS.format("list-fsdp:d1"))
def outputs_of_weightless_samples_are_lost(right: Function) -> Function:
    """A micro-batch without weight returns zeros instead of its outputs."""

    def wrong(self: Any, outputs: Any, mb: Any) -> Any:
        loss, result = right(self, outputs, mb)
        if loss is None:
            result = dataclasses.replace(result, outputs=pytree.tree_map(torch.zeros_like, result.outputs))
        return loss, result

    return wrong


@mutant("areal.engine.base:BaseTrainEngine._restored", RETURNS.format("padded-fsdp:d1"))
def outputs_of_a_step_in_packed_order(right: Function) -> Function:
    """Outputs are returned in the order of the micro-batches."""

    def wrong(self: Any, mbs: Any, results: Any) -> Any:
        counter = itertools.count()
        mbs = dataclasses.replace(
            mbs,
            mbs=tuple(dataclasses.replace(mb, sample_ids=tuple(next(counter) for _ in mb.sample_ids)) for mb in mbs),
        )
        return right(self, mbs, results)

    return wrong


@mutant(
    "areal.api.arguments:default_loss_weight",
    "unit/losses/test_losses_objective.py::test_weights_are_exact[default]",
)
def weights_rounded(right: Function) -> Function:
    """Loss weights are summed in float32, so that the loss depends on how the batch was cut, in its eighth digit."""
    return lambda batch: right(batch).float()
