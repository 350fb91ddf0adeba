"""Bugs of data-parallel ranks without samples that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

from areal.engine.step_sync import AgreedPlan
from areal.tests.mutants.planting import Function, mutant
from areal.utils.data.padding import NO_SAMPLES

ENGINE = "dist/parallel/test_empty_rank.py::"
OUTPUTS = ENGINE + "test_outputs_of_an_empty_rank_have_the_form_of_the_batch[fsdp:d2]"
DROPPED = ENGINE + "test_rank_whose_samples_are_all_dropped_has_outputs_of_zeros[fsdp:d2]"
CALLS = ENGINE + "test_calls_with_another_empty_rank_each_accumulate[False-fsdp:d2]"
LOOP = ENGINE + "test_custom_loop_on_an_empty_rank[fsdp:d2]"
NOTHING = ENGINE + "test_empty_global_batch_raises_one_error_and_changes_nothing[fsdp:d2]"
TRAINED = "dist/trainer/test_empty_ranks.py::test_steps_with_an_empty_rank_equal_those_without[w2-{}-fsdp:d2]"
SKIPPED = "dist/trainer/test_empty_ranks.py::test_ppo_skips_a_batch_without_any_sample[{}]"


# ---- the step


@mutant(
    "areal.engine.loss_step:local_weights", {"empty_rank": "first", "layout": "fsdp:d2", "objective_name": "sequence"}
)
def empty_rank_has_a_weight(right: Function) -> Function:
    """A rank without samples adds 1 to the global weight."""

    def wrong(mbs: Any, loss_weight_fn: Any) -> Any:
        plain, per_mb = right(mbs, loss_weight_fn)
        return plain, per_mb or {0: {"loss": 1.0}}

    return wrong


@mutant("areal.engine.faults:zero_gradient_loss", CALLS)
def filler_has_a_gradient(right: Function) -> Function:
    """The loss of a filler is the sum of its outputs."""

    def wrong(outputs: Any) -> torch.Tensor:
        values = [x for x in vars(outputs).values() if isinstance(x, torch.Tensor) and x.requires_grad]
        return torch.stack([x.double().sum() for x in values]).sum() if values else right(outputs)

    return wrong


@mutant(
    "areal.engine.faults:reach_all_heads", "dist/faults/test_unread_heads.py::test_gradient_of_an_unread_head_is_zero"
)
def head_that_a_loss_does_not_read_is_not_reached(right: Function) -> Function:
    """The backward of a loss reaches the heads that it reads, and that of a filler all."""
    return lambda loss, outputs: loss


@mutant(
    "areal.engine.step_sync:_check_asked",
    "dist/faults/test_unequal_ranks.py::test_ranks_that_ask_for_different_outputs_are_told[fsdp:d2]",
)
def outputs_of_ranks_are_not_compared(right: Function) -> Function:
    """Ranks that ask for different outputs run, as far as they come."""
    return lambda asked: None


@mutant("areal.engine.step_sync:StepSync.plan", NOTHING)
def empty_global_batch_runs_fillers(right: Function) -> Function:
    """A global batch without samples runs fillers on all ranks instead of raising."""

    def wrong(self: Any, plan_here: Any, *args: Any, **options: Any) -> Any:
        try:
            return right(self, plan_here, *args, **options)
        except ValueError as error:
            if "empty batch" not in str(error):
                raise
            plan = plan_here()
            return AgreedPlan(plan, 1, plan.padded_length, 1)

    return wrong


@mutant("areal.utils.data.columns:_read_list", TRAINED.format("one group"), OUTPUTS)
def empty_list_refused_by_its_rank(right: Function) -> Function:
    """Each rank checks for itself that its list has samples, instead of all together."""

    def wrong(samples: Any, spec: Any) -> Any:
        if not samples:
            raise AssertionError("empty batch: the list has no samples")
        return right(samples, spec)

    return wrong


@mutant("areal.utils.data.batch_plan:BatchPlan.beside_idle_ranks", LOOP)
def fillers_without_keys_of_the_batch(right: Function) -> Function:
    """The fillers of a rank without samples have token ids and targets only."""
    return lambda self, keys: right(self, NO_SAMPLES)


# ---- outputs


@mutant("areal.api.microbatch:MicroBatchList.restore", OUTPUTS)
def empty_rank_returns_a_row(right: Function) -> Function:
    """A rank without samples returns the output of a filler instead of an empty list."""

    def wrong(self: Any, per_mb: Any, **options: Any) -> Any:
        restored = right(self, per_mb, **options)
        return [torch.zeros(1)] if restored == [] else restored

    return wrong


@mutant("areal.engine.step_sync:StepSync.result_of_a_peer", DROPPED)
def shapes_of_a_peer_unknown(right: Function) -> Function:
    """A rank with fillers only takes each output for one float32 number per token."""

    def wrong(self: Any, mbs: Any, results: Any) -> Any:
        return pytree.tree_map(lambda x: torch.zeros(0), right(self, mbs, results))

    return wrong


@mutant("areal.api.microbatch:MicroBatchList._restore_leaf", DROPPED)
def dropped_samples_have_no_rows(right: Function) -> Function:
    """A rank whose samples were all dropped returns an empty list instead of zeros."""

    def wrong(self: Any, leaves: Any) -> Any:
        without_rows = dataclasses.replace(self, form=dataclasses.replace(self.form, seqlens=()), dropped=())
        return right(self if self.real else without_rows, leaves)

    return wrong


# ---- trainers


@mutant("areal.trainer.ppo:PPOTrainer._sum_over_ranks", TRAINED.format("four mini-batches"), TRAINED.format("failed"))
def minibatch_skipped_by_one_rank(right: Function) -> Function:
    """Each rank decides by its own samples whether a mini-batch is skipped, so that no step is taken while one rank is empty."""

    def wrong(self: Any, count: int) -> float:
        smallest = torch.tensor(float(count))
        everyones = self.engine.global_sum(torch.eye(self.engine.dp_size)[self.engine.dp_rank] * smallest)
        return everyones.min().item()

    return wrong


@mutant("areal.trainer.mismatch:mismatch", SKIPPED.format("w2-recomputed"))
def unmeasured_disagreement_is_zero(right: Function) -> Function:
    """A batch without a trained token reports a disagreement of exactly 0 between trainer and rollout."""
    return lambda *args, **options: {"rollout/logprob_error": 0.0, "rollout/logprob_k3": 0.0} | right(*args, **options)


@mutant("areal.trainer.advantages.normalize:normalize", TRAINED.format("too long"))
def empty_rank_counts_in_statistics(right: Function) -> Function:
    """A rank without tokens adds one advantage of 0 to the mean and the deviation over ranks."""

    def wrong(x: torch.Tensor, mask: Any = None, **options: Any) -> torch.Tensor:
        return right(x, mask, **options) if len(x) else right(torch.zeros(1), torch.ones(1), **options)[:0]

    return wrong
