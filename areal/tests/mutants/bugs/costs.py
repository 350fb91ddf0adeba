"""Bugs of costs that the suite must catch: of memory, of waits of the host, and of their measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

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
    "areal.engine.fsdp.gradients:_trained_elements",
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


@mutant("areal.utils.dtensor:gathered_dtype", _GATHERED + "test_half_the_bytes*[*fsdp:d2]")
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
