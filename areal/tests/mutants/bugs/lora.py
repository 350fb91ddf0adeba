"""Bugs of adapters that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

FILE = "dist/checkpoint/test_lora.py::"
ISOLATED = FILE + "test_adapters_are_isolated_bitwise[fsdp:d1]"
LOOK = FILE + "test_reading_gradients_then_accumulating_counts_each_once[{}]"
PEFT = FILE + "test_adapter_round_trips_with_peft[llama-{}]"
BYTES = FILE + "test_adapter_training_keeps_model_weights_bitwise[{}]"
ALONE = FILE + "test_single_adapter_is_saved_and_resumed[{}]"


@mutant("areal.engine.lora.low_rank:LowRank.apply", PEFT.format("fsdp:d1"))
def without_the_scale(right: Function) -> Function:
    """An adapter's contribution is not scaled."""

    def wrong(self: Any, out: Tensor, x: Tensor) -> Tensor:
        return out + (right(self, out, x) - out) / self.scale

    return wrong


@mutant("areal.engine.lora.low_rank:WeightDelta.add_to", PEFT.format("fsdp:t2"))
def merged_at_the_first_rows(right: Function) -> Function:
    """Every rank merges the first rows and columns of the product into its slice of a weight."""
    return lambda self, weight, box: right(self, weight, tuple(slice(0, n) for n in weight.shape))


@mutant("areal.engine.lora.adapter:Adapter.before_backward", LOOK.format("fsdp:d2"))
def sums_are_summed_again(right: Function) -> Function:
    """Every rank accumulates into a gradient that is already reduced, and the next reduction counts that once per rank."""

    def wrong(self: Any) -> None:
        self._summed = False

    return wrong


@mutant("areal.engine.lora.adapter:Adapter.sum_gradients", BYTES.format("fsdp:t2"))
def gradients_of_own_columns(right: Function) -> Function:
    """Partial gradients of tensor-parallel ranks are not summed."""

    def wrong(self: Any) -> None:
        for factor in self.factors:
            factor.summed = False
        right(self)

    return wrong


@mutant("areal.engine.lora.adapter_set:AdapterSet.zero_grad", ISOLATED)
def a_step_discards_all_gradients(right: Function) -> Function:
    """A step of one adapter discards the gradients that are pending for the others."""

    def wrong(self: Any) -> None:
        for name in self.names:
            self[name].zero_grad()

    return wrong


@mutant("areal.engine.lora.adapter:Adapter.resume", ALONE.format("fsdp:d1"))
def moments_without_the_schedule(right: Function) -> Function:
    """A resumed adapter has its moments but the learning rate of the first step."""
    return lambda self, state: right(self, {**state, "schedule": self.optimizer.state_dict()})


# ---- the output head

HEAD = "dist/checkpoint/test_lora_head.py::"


@mutant(
    "areal.engine.lora.low_rank:LowRank.head_update",
    HEAD + "test_head_adapter_round_trips_with_peft[llama-fsdp:d1]",
    HEAD + "test_head_adapter_round_trips_with_peft[qwen3_tied-megatron:t2]",
)
def head_without_the_scale(right: Function) -> Function:
    """The contribution of the head's adapter is not scaled."""
    return lambda self: right(self)._replace(scale=1.0)


@mutant(
    "areal.utils.functional.vocab_parallel:VocabShard.sum",
    "dist/parallel/test_vocab_parallel.py::test_vocab_parallel_update_equals_full_update[*2*]",
    HEAD + "test_three_steps_with_tied_embeddings_track_the_reference[fsdp:t2]",
)
def narrow_gradients_stay_partial(right: Function) -> Function:
    """The gradient of the head's ``A @ x`` is that of this rank's rows of the vocabulary."""
    return lambda self, x: x if x.shape[-1] < 5 else right(self, x)


@mutant("areal.engine.lora.peft_format:_check_copy", HEAD + "test_head_of_other_weights_is_refused[*]")
def other_head_is_loaded(right: Function) -> Function:
    """The copy of the head's weight in the file of an adapter is not compared with the model."""
    return lambda *args: None


# ---- selection of layers, initial factors

KINDS = "dist/checkpoint/test_lora_kinds.py::"


@mutant("areal.engine.lora.peft_format:_names_of_kinds", KINDS + "test_kinds_that_share_names_are_told_apart")
def kinds_by_last_component(right: Function) -> Function:
    """Layers of another kind with the same last component get an adapter, too."""
    return lambda *args: sorted({name.rpartition(".")[2] for name in right(*args)})


@mutant(
    "areal.engine.lora.adapter:Adapter.draw",
    KINDS + "test_initial_factors_are_those_of_rank_and_seed_on_every_layout[fsdp:p2]",
    KINDS + "test_initial_factors_are_those_of_rank_and_seed_on_every_layout[megatron:t2]",
)
def factors_drawn_in_the_order_of_the_rank(right: Function) -> Function:
    """One generator draws the slices of all layers that a rank has."""

    def wrong(self: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for pair in self.pairs.values():
            bound = pair.target.inputs**-0.5
            local = torch.empty(pair.down.parameter.shape).uniform_(-bound, bound, generator=generator)
            pair.down.parameter.data.copy_(local)

    return wrong


# ---- several adapters in one call

MIXED = "dist/checkpoint/test_lora_mixed.py::"
EACH = MIXED + "test_each_adapter_has_the_gradient_of_its_samples[{}]"
FAILED = "dist/checkpoint/test_lora_calls.py::test_failed_call_changes_no_pending_gradient[{}]"
PACKED = "unit/data/test_batches_of_adapters.py::"


@mutant("areal.engine.lora.row_products:Down.backward", EACH.format("megatron:p2"))
def gradients_of_the_next_adapter(right: Function) -> Function:
    """The gradient of one adapter's ``A`` goes to another adapter with an ``A`` of the same shape."""

    def wrong(ctx: Any, *grads: Any) -> Any:
        x, width, spans, saved, *downs = right(ctx, *grads)
        for k in range(1, len(downs)):
            if downs[k].shape == downs[k - 1].shape:
                downs[k - 1], downs[k] = downs[k], downs[k - 1]
        return x, width, spans, saved, *downs

    return wrong


@mutant("areal.engine.stream.layout:AdapterRuns.slices", EACH.format("fsdp:t2-whole"))
def runs_of_the_first_rank(right: Function) -> Function:
    """Every tensor-parallel rank has the runs of the first rank's tokens."""
    return lambda self, n_rows, rank: right(self, n_rows, 0)


@mutant("areal.utils.data.batch_plan:BatchPlan._build_real", EACH.format("megatron:p2"), PACKED + "test_each_adapter_*")
def run_begins_one_sample_late(right: Function) -> Function:
    """The first sample of a run has the adapter of the run before."""

    def wrong(self: Any, length: Any, layout: Any, adapters: Any) -> Any:
        def shifted(seqlens: Any, padded: Any, tree: Any, wanted: Any, named: Any, *more: Any) -> Any:
            return layout(seqlens, padded, tree, wanted, named and (named[0], *named[:-1]), *more)

        for mb in right(self, length, shifted, adapters):
            yield dataclasses.replace(mb, adapters=mb.adapters and (mb.adapters[0], *mb.adapters[:-1]))

    return wrong


@mutant("areal.engine.lora.adapter_set:AdapterSet.gradients_of", EACH.format("megatron:p2"))
def other_adapters_lose_their_gradients(right: Function) -> Function:
    """A call discards the pending gradients of the adapters that its samples do not name."""

    def wrong(self: Any, names: Any) -> Any:
        for name in set(self.names) - set(names):
            self[name].zero_grad()
        return right(self, names)

    return wrong


@mutant("areal.engine.lora.adapter:Adapter.undo_call", FAILED.format("fsdp:d2-infinite"))
def failed_call_stays_half_added(right: Function) -> Function:
    """The gradients of the micro-batches before an error stay pending."""
    return lambda self: None


@mutant(
    "areal.utils.data.bins:merge_bins", PACKED + "test_each_adapter_has_the_micro_batches_that_it_has_alone[*spec3*]"
)
def bins_of_an_adapter_are_merged(right: Function) -> Function:
    """Bins of all adapters are packed anew, by their lengths."""
    return lambda bins, sizes, budget, **options: right(
        [[b] for one in bins for b in one], [[n] for one in sizes for n in one], budget, **options
    )


# ---- factors in JAX

IN_JAX = EACH.format("jax:t2-whole")


@mutant("areal.engine.jax.lora.contribution:_of_slots", IN_JAX)
def tokens_have_all_adapters(right: Function) -> Function:
    """Each token has the contributions of all adapters of its micro-batch."""
    return lambda low, slots, use: right(low, None, use)


@mutant("areal.engine.jax.lora.factors:StackedFactors.gradients", IN_JAX)
def gradients_without_the_scale(right: Function) -> Function:
    """The gradient of an adapter's ``B`` is not multiplied by its scale."""

    def wrong(self: Any, arrays: Any) -> Any:
        self._places = [dataclasses.replace(place, scale=1.0) for place in self._places]
        return right(self, arrays)

    return wrong


@mutant(
    "areal.engine.jax.lora.factors:jax_adapter_layout",
    "dist/jax/test_jax_adapters.py::test_step_of_all_samples_is_the_same_on_every_rank[w2]",
)
def gradients_of_own_samples(right: Function) -> Function:
    """Gradients are not summed over data-parallel ranks."""
    return lambda *args: dataclasses.replace(right(*args), replicas=[])


@mutant(
    "areal.engine.lora.adapter:Adapter.draw",
    KINDS + "test_initial_factors_are_those_of_rank_and_seed_on_every_layout[jax:t2]",
)
def factors_drawn_for_the_rank(right: Function) -> Function:
    """Every rank draws other factors."""
    return lambda self, seed: right(self, seed + dist.get_rank())
