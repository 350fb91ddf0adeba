"""Bugs in the processes and the placement of the JAX engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from areal.tests.mutants.planting import Function, mutant


@mutant(
    "areal.engine.jax.runtime.world:leave_after_fault",
    "dist/jax/test_jax_faults.py::test_error_inside_of_a_program[jax:d2]",
)
def world_kept_after_a_fault(right: Function) -> Function:
    """The next engine computes in a world whose connections are shut down."""
    return lambda control: None


@mutant(
    "areal.engine.jax.mesh:stored_spec",
    "dist/step/test_memory_report.py::test_report_is_of_the_shard[jax:d2]",
)
def every_rank_has_everything(right: Function) -> Function:
    """Parameters are not divided over data-parallel ranks."""
    return lambda name, shape, mesh: type(right(name, shape, mesh))(
        *(axis if axis == "tp" else None for axis in right(name, shape, mesh))
    )


@mutant("areal.engine.jax.mesh:_devices_of", "unit/jax/test_mesh.py::test_devices_of_a_process_are_consecutive_ranks")
def devices_of_processes_in_turn(right: Function) -> Function:
    """The ranks take a device of each process in turn: a process computes streams of other processes."""

    def wrong(processes: Any, devices: Any, each: int = 1) -> Any:
        found = right(processes, devices, each)
        return [found[k] for start in range(each) for k in range(start, len(found), each)]

    return wrong


@mutant(
    "areal.engine.jax.inputs:LocalStreams.result",
    "unit/jax/test_inputs.py::test_streams_of_a_process_are_one_micro_batch",
)
def outputs_of_another_stream(right: Function) -> Function:
    """The outputs of the streams of a process come back in another order."""
    return lambda self, name, rows: right(self, name, rows.flip(0))


@mutant("areal.utils.data.streams:join_trees", "unit/data/test_streams.py::test_tree_of_streams_is_that_of_their_trees")
def tokens_of_the_first_stream(right: Function) -> Function:
    """The trees of all streams refer to tokens of the first one."""
    return lambda trees: replace(right(trees), tokens=torch.cat([tree.tokens for tree in trees]))


@mutant(
    "areal.engine.jax.mesh:device_view",
    "dist/jax/test_jax.py::test_arrays_of_a_tpu_enter_and_leave_through_host_memory[w1]",
)
def memory_of_a_tpu_is_lent(right: Function) -> Function:
    """Arrays leave JAX by a protocol that it has for CPUs and GPUs only."""
    return torch.from_dlpack


@mutant(
    "areal.engine.jax.model.spec:ModelSpec.from_local",
    "dist/jax/test_transfers.py::test_step_transfers_inputs_and_a_gradient_for_each_micro_batch[jax:d1]",
)
def inputs_copied_to_the_device_twice(right: Function) -> Function:
    """Each array of a micro-batch goes to the device, and then again."""

    def wrong(self: Any, values: Any) -> Any:
        right(self, values)
        return right(self, values)

    return wrong
