"""Bugs of costs that the suite must catch: of memory, of waits of the host, of their measurement, and of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

_OFFLOAD = "dist/step/test_memory.py::test_offload_uses_kept_memory_waits_once_and_returns_memory_to_the_device"
PLAN = "unit/plan/test_plan.py::"


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


@mutant("areal.plan.trace:Trace.plus", PLAN + "test_few_layers_tell_the_costs_of_all[fsdp:d2t2]")
def one_layer_is_left_out(right: Function) -> Function:
    """The extrapolation misses the last layer."""
    return lambda self, other, factor: right(self, other, factor - 1)


@mutant(
    "areal.plan.hardware:Hardware.collective_seconds",
    PLAN + "test_collectives_of_parameters_overlap_and_others_do_not",
)
def every_collective_stays_on_a_node(right: Function) -> Function:
    """Collectives over several nodes take as long as on one."""

    def wrong(self, name: str, nbytes: float, size: int, stride: int) -> float:  # type: ignore[no-untyped-def]
        return right(replace(self, network_gbps=self.node_gbps), name, nbytes, size, stride)

    return wrong


@mutant("areal.plan.planned_engine:PlannedEngine.optimizer_bytes", PLAN + "test_state_is_two_moments_of_the_parameters")
def one_moment(right: Function) -> Function:
    """AdamW is planned with one moment instead of two."""
    return lambda self: right(self) // 2
