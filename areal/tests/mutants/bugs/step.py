"""Bugs in the shared step and in the FSDP engine that the suite must catch.

Each is a function from the right function to a wrong one; its docstring describes the bug.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist

from areal.api import IGNORE_INDEX
from areal.engine.attention.token_stream import TokenStream
from areal.tests.mutants.planting import Function, mutant

LOOP = "dist/step/test_steps.py::test_custom_loop_equals_train_batch[{}]"
THREE = "dist/step/test_steps.py::test_three_steps_track_the_reference[{}]"
CALLS = "dist/step/test_steps.py::test_accumulated_calls_equal_one_batch[{}]"
SKIPPED = "dist/faults/test_bad_losses.py::test_non_finite_gradient_skips_step[fsdp:d1]"


# ---- divisor of the gradient


@mutant("areal.engine.schedule:SequentialSchedule.grad_scale", LOOP.format("fsdp:d1"))
def factor_n_mb(right: Function) -> Function:
    """The gradient is multiplied by the number of micro-batches."""
    return lambda self, n: n * right(self, n)


@mutant("torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor", THREE.format("adamw-cosine-fsdp:d2"))
def averaged_over_ranks(right: Function) -> Function:
    """Gradients are averaged over ranks instead of summed."""
    return lambda self, factor: right(self, float(dist.get_world_size()))


@mutant("areal.engine.step_sync:StepSync.weights", THREE.format("adamw-cosine-fsdp:d2"))
def divided_by_own_weight(right: Function) -> Function:
    """Each rank divides by its local weight instead of the global one."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights = right(self, *args, **kwargs)
        own = {name: sum(mb[name] for mb in weights.per_mb.values()) or 1.0 for name in weights.total}
        return dataclasses.replace(weights, total=own)

    return wrong


@mutant("areal.engine.step_sync:StepSync._once_per_shard", THREE.format("adamw-cosine-fsdp:c2-ulysses"))
def context_parallel_counted_twice(right: Function) -> Function:
    """Context-parallel ranks each count the weight of their common batch shard."""
    return lambda self, answers: answers


@mutant("areal.engine.attention.context_parallel:_GatherStream.backward", LOOP.format("fsdp:c2-ulysses"))
def gathered_gradients_summed(right: Function) -> Function:
    """The backward of the gather over context-parallel ranks sums gradients that are equal on every rank."""

    def wrong(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.cp.group)
        return right(ctx, grad)

    return wrong


@mutant("areal.engine.loss_step:local_weights", LOOP.format("fsdp:c2-gather_kv"))
def padding_counted(right: Function) -> Function:
    """Padding counts in the weight."""

    def wrong(mbs: Any, loss_weight_fn: Any) -> Any:
        plain, per_mb = right(mbs, loss_weight_fn)
        for mb in mbs.real:
            for name in per_mb[mb.index]:
                per_mb[mb.index][name] += mb.padded_length - mb.n_tokens
        return plain, per_mb

    return wrong


@mutant("areal.engine.loss_step:local_weights", THREE.format("adamw-cosine-fsdp:d2"))
def filler_counted(right: Function) -> Function:
    """The sequence of a filler counts in the weight."""
    return lambda mbs, loss_weight_fn: right(fillers_as_real(mbs), loss_weight_fn)


@mutant(
    "areal.engine.schedule:SequentialSchedule.run",
    "dist/step/test_fillers_positions_dropout.py::test_filler_is_not_passed_to_process_function[w2-fsdp:d2]",
)
def filler_processed(right: Function) -> Function:
    """A filler is passed to the process function."""
    return lambda self, mbs, *args, **kwargs: right(self, fillers_as_real(mbs), *args, **kwargs)


def fillers_as_real(mbs: Any) -> Any:
    """Return the same micro-batches without filler flags."""
    return dataclasses.replace(mbs, mbs=tuple(dataclasses.replace(mb, filler=False) for mb in mbs))


@mutant(
    "areal.engine.loss_step:LossStep.__call__",
    "dist/faults/test_faults.py::test_loss_is_not_called_on_rank_without_weight[fsdp:d2c2]",
)
def loss_called_without_weight(right: Function) -> Function:
    """The loss function is called for a micro-batch without weight."""

    def wrong(self: Any, outputs: Any, mb: Any) -> Any:
        if not any(self._weights.per_mb[mb.index].values()):
            self._loss_fn(outputs, mb.data)
        return right(self, outputs, mb)

    return wrong


@mutant("areal.engine.loss_step:LossStep.__init__", THREE.format("sgd-wsd-fsdp:d1"))
def one_denominator_for_all_terms(right: Function) -> Function:
    """Every term of a loss is divided by the weight of the first."""

    def wrong(self: Any, loss_fn: Any, weights: Any, divisors: dict[str, float], *rest: Any) -> None:
        first = next(iter(divisors.values()))
        right(self, loss_fn, weights, dict.fromkeys(divisors, first), *rest)

    return wrong


@mutant("areal.engine.loss_step:LossStep.__init__", CALLS.format("weight-fsdp:d1"))
def loss_weight_applied_twice(right: Function) -> Function:
    """``loss_weight`` scales the loss and then the gradient again."""
    return lambda self, loss_fn, weights, divs, scale, *rest: right(self, loss_fn, weights, divs, scale * scale, *rest)


# ---- visible tokens and targets


@mutant("areal.engine.model.packed_lm:model_inputs", LOOP.format("fsdp:c2-ulysses"))
def targets_rolled_after_slicing(right: Function) -> Function:
    """Each context-parallel rank rolls its own slice, whose last token then has a wrong target."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        inputs = right(*args, **kwargs)
        rolled = torch.where(inputs.targets == IGNORE_INDEX, inputs.targets, inputs.input_ids.roll(-1))
        return dataclasses.replace(inputs, targets=rolled)

    return wrong


@mutant("areal.utils.data.targets:_masked", LOOP.format("fsdp:d1"))
def last_position_weighted(right: Function) -> Function:
    """The last position of a sequence keeps its loss weight although it is without a target."""
    return lambda loss_mask, missing: loss_mask


@mutant("areal.engine.attention.context_parallel:ContextParallel.layout", LOOP.format("fsdp:d1"))
def attention_leaks(right: Function) -> Function:
    """A sequence attends to those packed before it."""
    return lambda self, stream, *args: right(self, TokenStream.of((len(stream),), len(stream)), *args)


@mutant("areal.engine.attention.kernels:_attend", CALLS.format("weight-fsdp:d1"))
def window_off_by_one(right: Function) -> Function:
    """A sliding window is one key too wide."""

    def wrong(q: Any, k: Any, v: Any, segments: Any, options: Any) -> Any:
        window = options.window and options.window + 1
        return right(q, k, v, segments, dataclasses.replace(options, window=window))

    return wrong


@mutant(
    "areal.engine.model.packed_lm:model_inputs",
    "dist/step/test_fillers_positions_dropout.py::test_learned_positions_restart_per_sequence[fsdp:d1]",
)
def positions_run_on(right: Function) -> Function:
    """Positions do not restart with each sequence."""

    def wrong(mb: Any, cp: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = right(mb, cp, *args, **kwargs)
        return dataclasses.replace(inputs, position_ids=cp.shard(torch.arange(mb.padded_length)))

    return wrong


@mutant(
    "areal.engine.attention.ulysses:ulysses_attention",
    "dist/parallel/test_context_parallel.py::test_context_parallel_attention_equals_one_process[w2-kv3-ulysses]",
)
def key_heads_in_wrong_order(right: Function) -> Function:
    """Key heads, fewer than ranks, are repeated block-wise instead of one by one."""

    def wrong(q: Any, k: Any, v: Any, segments: Any, group: Any, options: Any) -> Any:
        size = dist.get_world_size(group)
        repeats = size // math.gcd(size, k.shape[1])
        return right(q, k.repeat(1, repeats, 1), v.repeat(1, repeats, 1), segments, group, options)

    return wrong


@mutant("areal.engine.attention.gather_kv:zigzag_restore", LOOP.format("fsdp:c2-gather_kv"))
def zigzag_not_undone(right: Function) -> Function:
    """Outputs gathered over zig-zag slices stay in rank order."""
    return lambda x, size: x


@mutant("areal.engine.model.packed_lm:model_inputs", {"layout": "fsdp:d1", "case_name": "starved", "dtype": "float64"})
def temperature_ignored_in_evaluation(right: Function) -> Function:
    """Temperature is applied in training only."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        inputs = right(*args, **kwargs)
        return inputs if torch.is_grad_enabled() else dataclasses.replace(inputs, temperature=1.0)

    return wrong


@mutant(
    "areal.engine.components:EngineComponents.evaluating",
    "dist/step/test_fillers_positions_dropout.py::test_eval_disables_dropout_and_restores_it[fsdp:d1]",
)
def dropout_in_evaluation(right: Function) -> Function:
    """An evaluation runs with dropout."""

    def wrong(self: Any) -> Any:
        self.model.eval = self.model.train
        return right(self)

    return wrong


# ---- gradient reduction and accumulation


@mutant("areal.engine.fsdp.gradients:gradient_sync_hook", LOOP.format("fsdp:d2"))
def last_backward_not_reduced(right: Function) -> Function:
    """The last backward of a call does not reduce the gradients."""

    def wrong(model: Any, *, every: bool) -> Function:
        before_backward = right(model, every=every)
        return lambda last: before_backward(False)

    return wrong


@mutant("areal.engine.fsdp.engine:FSDPEngine._finalize_grads", LOOP.format("fsdp:r2"))
def reduced_twice(right: Function) -> Function:
    """Gradients that every call has reduced are reduced again over replicas when they are finalised."""

    def wrong(self: Any) -> None:
        right(self)
        for parameter in self._require_components().model.parameters():
            mesh = parameter.grad.device_mesh
            dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group(0))

    return wrong


@mutant("areal.engine.base:BaseTrainEngine.forward_backward", CALLS.format("sum-fsdp:d1"))
def calls_do_not_add_up(right: Function) -> Function:
    """A call discards the gradients of the call before it."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.zero_grad()
        return right(self, *args, **kwargs)

    return wrong


@mutant(
    "areal.engine.base:BaseTrainEngine.eval_batch",
    "dist/faults/test_faults.py::test_calls_out_of_order_raise_and_change_nothing[fsdp:d1]",
)
def evaluation_discards_gradients(right: Function) -> Function:
    """An evaluation discards pending gradients."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = right(self, *args, **kwargs)
        self._require_components().gradients.zero()
        return step

    return wrong


# ---- the optimizer step


@mutant("areal.engine.optimizer:_shard_groups", THREE.format("adamw-cosine-fsdp:d2"))
def clipped_by_local_norm(right: Function) -> Function:
    """Each rank clips by its local gradient norm."""
    return lambda grad: ()


@mutant("areal.engine.optimizer:_shard_groups", THREE.format("sgd-wsd-fsdp:r2"))
def norm_counts_replicas(right: Function) -> Function:
    """The norm counts every replica."""
    return lambda grad: tuple(grad.device_mesh.get_all_groups())


@mutant("areal.engine.optimizer:ClippingOptimizer.step", SKIPPED)
def skipped_step_advances(right: Function) -> Function:
    """A skipped step advances the schedule."""

    def wrong(self: Any, *settings: Any) -> Any:
        stats = right(self, *settings)
        self.steps += not stats.update_successful
        return stats

    return wrong


@mutant("areal.engine.optimizer:global_norm", SKIPPED)
def step_not_skipped(right: Function) -> Function:
    """A gradient that is not finite is applied."""
    return lambda *args: torch.nan_to_num(right(*args), nan=1.0, posinf=1.0)


@mutant(
    "areal.engine.optimizer:lr_factor",
    "unit/engine/test_lr_factor.py::test_lr_factor_equals_reference[warm-linear]",
)
def warmup_subtracted_twice(right: Function) -> Function:
    """The decay of the schedule starts a second warm-up later."""

    def wrong(step: int, config: Any, total_steps: int) -> float:
        warmup = config.warmup_steps
        return right(step if step < warmup else max(warmup, step - warmup), config, total_steps)

    return wrong


@mutant(
    "areal.engine.optimizer:ClippingOptimizer.load_state_dict",
    "dist/checkpoint/test_checkpoint.py::test_dcp_checkpoint_resumes_bitwise[adamw-fsdp:d1]",
)
def checkpoint_without_schedule(right: Function) -> Function:
    """Loading a checkpoint does not restore the schedule."""
    return lambda self, state: None


# ---- reported results and errors


@mutant("areal.engine.base:BaseTrainEngine.eval_batch", {"layout": "fsdp:d2"})
def evaluation_scaled_by_ranks(right: Function) -> Function:
    """The loss of an evaluation is multiplied by the number of data-parallel ranks."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = right(self, *args, **kwargs)
        return dataclasses.replace(step, loss=step.loss * self.dp_size)

    return wrong


@mutant(
    "areal.engine.loss_step:StepSums.add_metric",
    "dist/step/test_engine.py::test_mean_metric_is_weighted_over_micro_batches_and_ranks[fsdp:d1]",
)
def metrics_averaged_per_micro_batch(right: Function) -> Function:
    """A mean counts every micro-batch equally, independently of its weight."""

    def wrong(self: Any, name: str, reduce: str, value: float, weight: float) -> None:
        alike = (value / weight, 1.0) if reduce == "mean" and weight else (value, weight)
        right(self, name, reduce, *alike)

    return wrong


@mutant("areal.api.microbatch:MicroBatchList.restore", LOOP.format("fsdp:d1"))
def order_not_restored(right: Function) -> Function:
    """Outputs are returned in packing order."""

    def wrong(self: Any, per_mb: Any) -> Any:
        mbs, start = [], 0
        for mb in self.mbs:
            mbs.append(dataclasses.replace(mb, sample_ids=tuple(range(start, start + len(mb.sample_ids)))))
            start += len(mb.sample_ids)
        return right(dataclasses.replace(self, mbs=tuple(mbs)), per_mb)

    return wrong


@mutant(
    "areal.utils.distributed:raise_together",
    "dist/faults/test_faults.py::test_process_function_error_on_one_rank_raises_on_all_ranks[fsdp:d2]",
)
def fault_stays_with_its_rank(right: Function) -> Function:
    """An error raises only on the rank where it occurred."""
    return lambda faults, error, note="": None if error is None else right(faults, error, note)


@mutant(
    "areal.utils.data.batch_plan:BatchPlan.digest",
    "dist/faults/test_faults.py::test_different_batches_in_one_dp_shard_raise[fsdp:c2]",
)
def different_batches_accepted(right: Function) -> Function:
    """Different batches on ranks with the same data-parallel shard are accepted."""
    return lambda self: 0
