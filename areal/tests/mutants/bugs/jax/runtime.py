"""Bugs in the processes and the placement of the JAX engine."""

from __future__ import annotations

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


@mutant(
    "areal.engine.jax.mesh:device_view",
    "dist/jax/test_jax.py::test_arrays_of_a_tpu_enter_and_leave_through_host_memory[w1]",
)
def memory_of_a_tpu_is_lent(right: Function) -> Function:
    """Arrays leave JAX by a protocol that it has for CPUs and GPUs only."""
    return torch.from_dlpack
