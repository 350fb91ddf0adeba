"""Bugs that the suite must catch on the Megatron engine: the engine-independent ones, and its own."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import nn

from areal.tests.mutants.bugs.step import CALLS, LOOP, SKIPPED, THREE, fillers_as_real
from areal.tests.mutants.planting import MUTANTS, Function, Mutant, mutant

BETWEEN = "dist/megatron/test_megatron.py::test_reading_gradients_between_calls_changes_nothing[w2-{}]"
NORM = THREE.format("*-{}")

# ---- bugs of any engine

TWIN = "{}_on_megatron"

OTHERS = (
    "areal.engine.fsdp",
    "areal.engine.torch",
    "areal.recipes",
    "torch.distributed.fsdp",
    "areal.engine.schedule:SequentialSchedule",
    "areal.engine.optimizer:global_norm",  # Megatron has its own
    "areal.engine.optimizer:_shard_groups",
    "areal.engine.lora",
    "areal.utils.collectives",  # Megatron-Core has its own
    "areal.utils.dtensor:local_part",
)
"""Targets of bugs that exist only in another engine."""

SAME_ON_ANY_ENGINE = {
    "optimizer_fails_alone": "the template ends the engine on all ranks, around any optimizer",
    "positions_run_on": "its families have rotary positions alone, which are relative",
    "dropout_in_evaluation": "its families have no dropout",
    "outputs_of_ranks_are_not_compared": "ranks agree before the model runs, on any engine",
    "settings_of_ranks_are_not_compared": "the template compares them, for any engine",
    "checkpoints_of_ranks_are_not_compared": "the template compares them, for any engine",
    "returned_outputs_are_those_of_the_loss": "losses are computed around any engine",
    "source_of_the_engine_is_removed": "the saver is the same on any engine",
    "picture_is_known_by_its_address": "an engine has no part in reading rows",
    "empty_list_refused_by_its_rank": "an engine has no part in reading a batch",
    "minibatch_skipped_by_one_rank": "trainers are the same on any engine",
    "empty_rank_counts_in_statistics": "trainers are the same on any engine",
    "empty_shard_padded_with_a_sample": "a driver divides a batch for any engine",
    "few_samples_lose_one": "a driver divides a batch for any engine",
    "interleaved_rows_read_in_order": "its families store weights in the form of modules",
    "memory_reports_the_whole_model": "its parameters are whole on each data-parallel rank",
    "merged_weight_read_from_the_start": "its families store weights in the form of modules",
}
"""Bugs that need no second test on Megatron, and the reason. So do those of tests that name no engine: the second test is the first."""

ELSEWHERE: dict[str, tuple[str | Mapping[str, str], ...]] = {
    "loss_called_without_weight": (
        "dist/faults/test_faults.py::test_loss_is_not_called_on_rank_without_weight[megatron:d2p2]",
    ),
    "window_off_by_one": ("dist/megatron/test_megatron.py::test_megatron_sliding_windows[w1]",),
    "temperature_ignored_in_evaluation": (
        {"layout": "megatron:*", "objective_name": "policy", "case_name": "zero_rank"},
    ),
    "checkpoint_without_schedule": (
        "dist/megatron/test_megatron_checkpoint.py::test_megatron_checkpoint_resumes_bitwise[d1-sync]",
    ),
    "fillers_balanced": ("dist/parallel/test_moe_layouts.py::test_balancing_losses_are_loss_terms[megatron:d2--*]",),
    "fault_stays_with_its_rank": (
        "dist/faults/test_faults.py::test_process_function_error_on_one_rank_raises_on_all_ranks[megatron:d2]",
    ),
    "different_batches_accepted": (
        "dist/faults/test_faults.py::test_different_batches_in_one_dp_shard_raise[megatron:p2]",
    ),
}
"""Tests for bugs that are caught by a different test on Megatron."""


def plant_on_megatron(each: Mutant) -> None:
    """Register a bug for this engine too, unless its tests are the same on any."""
    tests = ELSEWHERE.get(each.name) or tuple(_on_megatron(test) for test in each.tests)
    name = TWIN.format(each.name)
    if tests != each.tests:
        MUTANTS[name] = dataclasses.replace(each, name=name, tests=tests)


def _on_megatron(test: str | Mapping[str, str]) -> str | Mapping[str, str]:
    if not isinstance(test, str):
        return {"layout": "megatron:*", **{name: value.replace("fsdp:", "megatron:") for name, value in test.items()}}
    # Optimizers are assigned to layouts in turn, and d1 gets all of them.
    test = re.sub(r"\[(adamw-cosine|sgd-wsd)-fsdp:(?!d1\])", "[*-fsdp:", test)
    return test.replace("fsdp:", "megatron:").replace("megatron:r2", "megatron:d2")


for _each in list(MUTANTS.values()):
    if not _each.target.startswith(OTHERS) and _each.name not in SAME_ON_ANY_ENGINE:
        plant_on_megatron(_each)


# ---- what a gradient is divided by


@mutant("areal.engine.megatron.schedule:MegatronSchedule.grad_scale", LOOP.format("megatron:d1"))
def megatron_factor_n_mb(right: Function) -> Function:
    """The gradient is multiplied by the number of micro-batches."""
    return lambda self, n: n * right(self, n)


@mutant("areal.engine.megatron.engine:transformer_config", LOOP.format("megatron:d1"))
def megatron_divides_by_micro_batches(right: Function) -> Function:
    """Megatron's schedule divides losses by the number of micro-batches."""

    def wrong(*args: Any) -> Any:
        config = right(*args)
        config.calculate_per_token_loss = False
        return config

    return wrong


@mutant("areal.engine.megatron.engine:MegatronEngine._wrap", LOOP.format("megatron:d2"))
def megatron_averages_over_ranks(right: Function) -> Function:
    """Gradients are averaged over data-parallel ranks instead of summed."""

    def wrong(self: Any, *args: Any) -> Any:
        chunks = right(self, *args)
        for chunk in chunks:
            for group in chunk.bucket_groups:
                for bucket in group.buckets:
                    bucket.gradient_scaling_factor = 1 / self.dp_size
        return chunks

    return wrong


# ---- when gradients are reduced, and what is summed


@mutant("areal.engine.megatron.schedule:MegatronSchedule.run", BETWEEN.format("d2"))
def megatron_finalises_each_call(right: Function) -> Function:
    """Every call reduces the gradients, and the optimizer step reduces these sums again."""

    def wrong(self: Any, *args: Any, forward_only: bool) -> Any:
        results = right(self, *args, forward_only=forward_only)
        if not forward_only:
            for chunk in self._chunks:
                chunk.finish_grad_sync()
        return results

    return wrong


@mutant("areal.engine.megatron.gradients:keep_one_copy", BETWEEN.format("d2"))
def megatron_sums_added_again(right: Function) -> Function:
    """Gradients that were reduced between calls are reduced over ranks once more."""
    return lambda chunks, groups: None


@mutant(
    "areal.engine.megatron.schedule:MegatronSchedule.run",
    "dist/step/test_fillers_positions_dropout.py::test_filler_is_not_passed_to_process_function[w2-megatron:d2]",
)
def megatron_filler_processed(right: Function) -> Function:
    """A filler reaches the process function."""
    return lambda self, mbs, *args, **kwargs: right(self, fillers_as_real(mbs), *args, **kwargs)


@mutant("areal.engine.megatron.model.layer_spec:RMSNorm.__init__", LOOP.format("megatron:t2"))
def megatron_norm_of_own_tokens(right: Function) -> Function:
    """With sequence parallelism the gradient of a norm's weight covers one rank's tokens only."""

    def wrong(self: Any, config: Any, *args: Any, **options: Any) -> None:
        right(self, config, *args, **options)
        self.weight.sequence_parallel = False

    return wrong


@mutant("areal.engine.megatron.model.packed_gpt:gather_from_sequence_parallel_region", LOOP.format("megatron:t2"))
def megatron_hidden_gradient_summed(right: Function) -> Function:
    """The gradient of the last hidden state, which is complete on every tensor-parallel rank, is summed over them."""
    return lambda x, tensor_parallel_output_grad=True, **options: right(x, True, **options)


@mutant("megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads", BETWEEN.format("p2"))
def megatron_tied_embedding_not_summed(right: Function) -> Function:
    """The first and the last stage do not sum their gradients of a tied embedding."""
    return lambda *args, **options: None


@mutant("areal.engine.megatron.model.packed_gpt:PackedGPT._embed", LOOP.format("megatron:d1"))
def megatron_padding_token_trained(right: Function) -> Function:
    """The row of the padding token has a gradient."""

    def wrong(self: Any, inputs: Any) -> Any:
        return self.embedding(input_ids=inputs.input_ids[None], position_ids=inputs.position_ids[None])

    return wrong


# ---- the optimizer step


@mutant("megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate", NORM.format("megatron:t2"))
def megatron_norm_counts_duplicates(right: Function) -> Function:
    """The norm counts replicated parameters once per tensor-parallel rank."""
    return lambda parameter, *args, **options: True


@mutant("areal.engine.megatron.weight_mapping:set_tensor_model_parallel_attributes", NORM.format("megatron:t2"))
def megatron_norm_misses_parts(right: Function) -> Function:
    """Parameters are not marked as sharded, so that the norm counts those of one tensor-parallel rank only."""
    return lambda *args, **options: None


@mutant("megatron.core.optimizer.optimizer:MegatronOptimizer.get_grad_stats_parallel_group", NORM.format("megatron:p2"))
def megatron_clipped_by_stage(right: Function) -> Function:
    """Each pipeline stage clips by its local gradient norm."""
    return lambda self: self.tp_group


@mutant("areal.engine.megatron.optimizer.step:MegatronOptimizerStep.global_norm", SKIPPED.replace("fsdp", "megatron"))
def megatron_step_not_skipped(right: Function) -> Function:
    """A gradient that is not finite is applied."""
    return lambda self: torch.nan_to_num(right(self), nan=1.0, posinf=1.0)


# ---- weights


@mutant("areal.engine.megatron.weight_mapping:_row_counts", LOOP.format("megatron:d1"))
def megatron_heads_not_grouped(right: Function) -> Function:
    """All queries precede all keys, and these precede all values."""

    def wrong(*args: Any) -> Any:
        counts, turns = right(*args)
        return [count * turns for count in counts], 1

    return wrong


@mutant("areal.engine.megatron.weight_mapping:_full_model_indices", THREE.format("*-megatron:e2"))
def megatron_experts_take_turns(right: Function) -> Function:
    """Experts are numbered as if they were assigned to expert-parallel ranks in turn."""

    def wrong(actual: Any, chunk: nn.Module) -> Any:
        numbers = right(actual, chunk)
        if "j" in actual:
            ranks = chunk.pg_collection.ep
            numbers["j"] = int(actual["j"]) * ranks.size() + ranks.rank()
        return numbers

    return wrong


@mutant(
    "areal.engine.megatron.gradients:expect_param_gather",
    "dist/megatron/test_overlapped_bits.py::test_overlap_changes_no_bit[megatron:d2-qwen3-float32]",
)
def update_is_not_gathered_after_a_reading(right: Function) -> Function:
    """Weights that were read between the reduction and the step are taken for those of the step."""
    return lambda chunks: None


@mutant("areal.engine.megatron.weight_mapping:_full_model_indices", LOOP.format("megatron:p2v2"))
def megatron_virtual_stages_in_a_row(right: Function) -> Function:
    """Layers are numbered as if the model chunks of a rank were consecutive."""

    def wrong(actual: Any, chunk: nn.Module) -> Any:
        numbers = right(actual, chunk)
        if "i" in actual:
            chunks = chunk.config.virtual_pipeline_model_parallel_size
            position = chunk.pg_collection.pp.rank() * chunks + chunk.vp_stage
            numbers["i"] = position * len(chunk.decoder.layers) + int(actual["i"])
        return numbers

    return wrong


@mutant("areal.engine.megatron.weight_mapping:_full_model_indices", CALLS.format("*-megatron:p2"))
def megatron_stages_swapped(right: Function) -> Function:
    """Layers are counted from the last one."""

    def wrong(actual: Any, chunk: nn.Module) -> Any:
        numbers = right(actual, chunk)
        if "i" in actual:
            numbers["i"] = chunk.config.num_layers - 1 - numbers["i"]
        return numbers

    return wrong


@mutant(
    "areal.engine.megatron.schedule:StageCommunicator._communicate",
    "dist/megatron/test_megatron.py::test_interleaved_stages_communicate_in_the_groups_of_the_engine[w2]",
)
def megatron_stages_in_the_default_group(right: Function) -> Function:
    """Interleaved stages communicate over the default process group, which no fault aborts."""
    return P2PCommunicator._communicate


# ---- overlapped reductions

ORDER = "dist/megatron/test_reduction_order.py::test_{}"


@mutant(
    "areal.engine.megatron.reductions:Reductions._complete_bucket",
    ORDER.format("order_does_not_depend_on_what_a_loss*"),
)
def megatron_buckets_do_not_wait(right: Function) -> Function:
    """The reduction of a bucket begins when it is complete, in another order on ranks whose losses reach other parameters."""

    def wrong(self: Any, number: int, force_all_reduce: bool = False) -> None:
        if number not in self._complete:
            self._complete.add(number)
            type(self._groups[number]).start_grad_sync(self._groups[number])

    return wrong


@mutant("areal.engine.megatron.reductions:Reductions.__init__", ORDER.format("reductions_begin_before_the_backward*"))
def megatron_buckets_in_the_order_of_the_forward(right: Function) -> Function:
    """All buckets wait for the one that the backward completes last."""

    def wrong(self: Any, chunks: Any) -> None:
        right(self, chunks)
        self._groups.reverse()
        for number, group in enumerate(self._groups):
            group.start_grad_sync = functools.partial(self._complete_bucket, number)

    return wrong


@mutant(
    "areal.engine.megatron.process_groups:ProcessGroups._get_or_create",
    ORDER.format("no_layer_communicates_in_the_group_of_buckets[megatron:c2-True]"),
)
def megatron_buckets_in_the_group_of_a_layer(right: Function) -> Function:
    """Reductions and context parallelism have one communicator, whose collectives must have one order on all ranks."""
    return lambda self, ranks, axis_names, *, apart=False: right(self, ranks, axis_names)


# ---- checkpoints

MOVES = "dist/megatron/test_engine_moves.py::test_a_run_that_moves_equals_one_that_stays[{}]"


@mutant("areal.engine.megatron.checkpoint:MegatronCheckpointer._step", MOVES.format("*megatron-fsdp"))
def megatron_steps_do_not_leave(right: Function) -> Function:
    """Another engine corrects the bias of loaded moments as in the first step."""

    def wrong(self: Any) -> Any:
        tensors = right(self)
        for boxes in tensors.values():
            boxes.boxes[0][1].zero_()
        return tensors

    return wrong


@mutant(
    "areal.engine.megatron.dist_checkpoint:_named_values",
    "dist/megatron/test_megatron_checkpoint.py::test_main_parameters_load_in_another_dtype[w2-bf16 to float32]",
)
def megatron_rounded_weights_are_saved(right: Function) -> Function:
    """A checkpoint has the rounded weights of a bf16 run, and not its main parameters."""

    def wrong(parameter: Any, state: Any, has_main: bool) -> Any:
        for named in right(parameter, state, has_main):
            swapped = {"model.{}": None, None: "model.{}"}
            key = swapped.get(named.run_key, named.run_key) if parameter.dtype == torch.bfloat16 else named.run_key
            yield dataclasses.replace(named, run_key=key)

    return wrong


@mutant(
    "areal.engine.megatron.model.packed_gpt:layer_windows",
    "dist/megatron/test_megatron.py::test_megatron_ignores_what_the_family_ignores[*window]",
)
def window_of_a_family_that_has_none(right: Function) -> Function:
    """A window in the configuration counts for any family."""
    return lambda hf: (getattr(hf, "sliding_window", None),) * hf.num_hidden_layers
