"""Bugs of costs that the suite must catch: of memory, of waits of the host, of calls on many ranks, and of their measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from areal.dispatch.executor import Reply, error_of
from areal.tests.mutants.planting import Function, mutant

SCALE = "unit/dispatch/test_scale.py::"

_OFFLOAD = "dist/step/test_memory.py::test_offload_uses_kept_memory_waits_once_and_returns_memory_to_the_device"


@mutant("areal.engine.state:EngineState.offload", f"{_OFFLOAD}[*fsdp:d1]")
def offload_returns_no_memory(right: Function) -> Function:
    """Offloaded tensors leave their memory in the allocator of the process."""

    def wrong(self: Any, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        self._require_components().memory.offload(params=params, grads=grads, optimizer=optimizer)

    return wrong


@mutant("areal.utils.offload:_HostBlocks.split", f"{_OFFLOAD}[*fsdp:d1]")
def offload_allocates_each_time(right: Function) -> Function:
    """Each offload allocates its host memory anew."""

    def wrong(self: Any, *args: Any) -> list[list[Tensor]]:
        self._blocks = []
        return right(self, *args)

    return wrong


@mutant(
    "areal.engine.fsdp.activation_checkpointing:saved_ops",
    "unit/engine/test_activation_checkpointing.py::test_attention_kernel_of_a_gpu_runs_once[selective-1]",
    "dist/parallel/test_expert_parallel.py::test_selective_checkpointing_keeps_exchanged_rows[*e2]",
)
def custom_operations_recomputed(right: Function) -> Function:
    """Selective checkpointing keeps the results of torch's own operations only."""
    return lambda: frozenset(op for op in right() if op.namespace == "aten")


_WAITS = "unit/gpu/test_host_waits.py::test_call_copies_to_the_device_once_and_never_waits"


@mutant("areal.engine.stream.layout:layout_of", f"{_WAITS}[*plain]", f"{_WAITS}[*gather_kv, shared]")
def layout_made_in_the_forward(right: Function) -> Function:
    """The index tensors of a micro-batch are made and copied in its forward."""
    return lambda mb, cp, *, rows: right(replace(mb, layout=None), cp, rows=rows)


@mutant(
    "areal.utils.host_copy:HostCopy.run", "unit/gpu/test_host_waits.py::test_micro_batches_and_fillers_share_one_copy"
)
def one_copy_for_each_tensor(right: Function) -> Function:
    """Each tensor of a batch is copied to the device separately."""
    return lambda self: None


@mutant(
    "areal.engine.loss_step:_read",
    "unit/gpu/test_host_waits.py::test_call_with_a_loss_waits_for_its_weights_and_its_results[*]",
)
def numbers_of_the_host_sent_to_the_device(right: Function) -> Function:
    """Weights of metrics, which are numbers of the host, are read by way of the device."""

    def wrong(scalars: Sequence[Tensor]) -> list[float]:
        device = next((scalar.device for scalar in scalars if scalar.device.type != "cpu"), torch.device("cpu"))
        return right([scalar.to(device) for scalar in scalars])

    return wrong


@mutant(
    "areal.engine.fsdp.gradients:trained_elements",
    "dist/step/test_memory.py::test_default_reduction_of_gradients_depends_on_the_size_of_the_model[*fsdp:d2]",
)
def unsharded_gradients_not_counted(right: Function) -> Function:
    """The default keeps unsharded gradients of a model of any size."""
    return lambda model: (right(model)[0],) * 2


@mutant(
    "areal.utils.profiling.phase_timer:TimedCall.read",
    "unit/engine/test_phase_timer.py::test_nested_phase_time_counts_only_for_the_innermost",
)
def reduction_counted_twice(right: Function) -> Function:
    """The time of a reduction is also counted in the backward around it."""

    def wrong(self: Any) -> Any:
        seconds, timings = right(self)
        if {"backward", "reduce"} <= set(timings):
            timings["backward"] += timings["reduce"]
        return seconds, timings

    return wrong


@mutant(
    "areal.engine.fsdp.gradients:time_reductions", "dist/step/test_profile.py::test_phases_sum_to_the_step[fsdp:r2]"
)
def reductions_not_told_apart(right: Function) -> Function:
    """FSDP's reductions within a backward are counted as backward."""
    return lambda model, timer: None


_GATHERED = "dist/parallel/test_gathered_bytes.py::"


@mutant("areal.utils.dtensor:gathered_dtype", _GATHERED + "test_half_the_bytes*[*fsdp:p2]")
def shards_gathered_before_the_cast(right: Function) -> Function:
    """A stream of weights in a narrower dtype gathers master weights."""
    return lambda own, wanted: own


@mutant("areal.engine.torch.weights:ShardedWeights.named_tensors", _GATHERED + "test_adapter_is_merged*[fsdp:d2]")
def adapter_merged_into_rounded_weights(right: Function) -> Function:
    """Weights with an adapter are rounded before the merge as well as after it."""
    return lambda self, *, dtype=None, exact=None: right(self, dtype=dtype)


@mutant(
    "areal.engine.fsdp.expert_parallel:_DispatchedExperts.use",
    "unit/gpu/test_host_waits.py::test_expert_parallelism_waits_once*[*full]",
)
def exchange_planned_again(right: Function) -> Function:
    """The recomputation of a layer exchanges the numbers of rows again, and reads them on the host."""
    return lambda self, plans: None


@mutant(
    "areal.engine.fsdp.expert_parallel:_CopiedRows.backward",
    "unit/gpu/test_host_waits.py::test_copies_of_rows_for_their_experts_are_one_gather",
)
def gradients_of_copies_unsorted(right: Function) -> Function:
    """The gradients of a token's copies are summed in the order in which they were sent."""
    return lambda ctx, grad: (grad.unflatten(0, ctx.shape).sum(1), None, None, None)


_TOKENS = "dist/parallel/test_gathered_tokens.py::"


@mutant("areal.engine.fsdp.gathered_tokens:GatheredTokens.linear", _TOKENS + "test_backward_keeps*[*even]")
def gathered_tokens_saved(right: Function) -> Function:
    """Tensor-parallel linear layers save the tokens of all ranks."""
    return lambda self, x, weight, bias: torch.nn.functional.linear(x, weight, bias)


@mutant("areal.engine.fsdp.gathered_tokens:GatheredTokens.saved", _TOKENS + "test_backward_keeps*[*lora]")
def gathered_tokens_saved_for_adapters(right: Function) -> Function:
    """Adapters of tensor-parallel linear layers save the tokens of all ranks."""
    return lambda self, x: None


@mutant("areal.engine.fsdp.gathered_tokens:_Again.gather", _TOKENS + "test_backward_keeps*[*even]")
def tokens_gathered_for_each_layer(right: Function) -> Function:
    """Each linear layer of a block gathers the tokens again."""

    def wrong(self: Any, shard: Tensor) -> Any:
        self._full = None
        return right(self, shard)

    return wrong


_GROUPS = "unit/gpu/test_gpu_of_each_rank.py::"


@mutant(
    "areal.utils.platform:collective_backend",
    _GROUPS + "test_groups_of_tensors_are_of_nccl_alone_and_the_control_plane_of_gloo",
)
def groups_of_tensors_with_gloo(right: Function) -> Function:
    """Each group of an engine on GPUs also connects its ranks over gloo."""
    return lambda: "cpu:gloo,cuda:nccl"


if find_spec("ray") is not None:

    @mutant("areal.dispatch.ray.replies:Replies._ask_after", SCALE + "test_error_of_one_rank_of_many*")
    def replies_are_read_when_ray_reports_one(right: Function) -> Function:
        """The error of a rank whose reply is not reported is read with the next reply that is."""
        return lambda self, seconds: None if seconds > 0.05 else right(self, seconds)

    @mutant("areal.dispatch.ray.replies:Replies._note", SCALE + "test_lines_of_a_call_grow_linearly")
    def all_replies_are_looked_at_after_some(right: Function) -> Function:
        """After some replies all are looked at, so that a call costs the square of its ranks."""

        def wrong(self: Any, call: Any, rank: int, value: Any) -> None:
            right(self, call, rank, value)
            if rank % 16 == 0:
                error_of([reply or Reply() for reply in call.replies])

        return wrong

    @mutant("areal.dispatch.ray.replies:Replies._take_ready", SCALE + "test_lost_process_is_named_from_its_reply*")
    def replies_after_that_of_a_lost_process_are_dropped(right: Function) -> Function:
        """The errors of other ranks are not read when the process of one is lost."""

        def wrong(self: Any, call: Any, ranks: Any) -> Any:
            for ref, rank in ranks.items():
                loss = right(self, call, {ref: rank})
                if loss is not None:
                    raise loss

        return wrong

    @mutant("areal.dispatch.ray.replies:Replies.take_arrived", SCALE + "test_calls_of_many_ranks_end_in_their_order")
    def later_calls_wait_for_the_first(right: Function) -> Function:
        """Replies to a later call are asked for when the call before has ended."""

        def wrong(self: Any) -> None:
            later = self.running[1:]
            self.running[1:] = []
            try:
                right(self)
            finally:
                self.running.extend(later)

        return wrong
