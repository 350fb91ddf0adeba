"""Training with the rounding of servers: outputs and gradients of every layout are those of one process, one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api import ParallelDims
from areal.tests.grid.cases import rows
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.harness.references.rounded_reference import RoundedReference
from areal.tests.harness.world import cached

TOLERANCE = 1e-10
FORMATS = ("fp8", "fp8_blocks", "int4", "nvfp4")
EXCLUDED = ("gate", "o_proj")

LAYOUTS = {
    "qwen3": ("fsdp:d1", "fsdp:d2", "fsdp:c2", "fsdp:p2", "fsdp:d2c2"),
    "qwen3_moe": ("fsdp:d1", "fsdp:d2", "fsdp:e2", "fsdp:d2e2"),
}


def cells() -> list[Any]:
    """Return all formats on one rank, and one after the other on the layouts of several."""
    params, turn = [], 0
    for family, layouts in LAYOUTS.items():
        for backend in layouts:
            world = ParallelDims.parse(backend).world_size
            for form in FORMATS if world == 1 else [FORMATS[turn % 4], FORMATS[(turn + 1) % 4]]:
                options = "recompute" if world > 1 and turn % 2 else "plain"
                id = f"{family}-{backend}-{form}"
                params.append(pytest.param(family, backend, form, options, id=id, marks=pytest.mark.world(world)))
            turn += 1
    return params


@pytest.mark.parametrize(("family", "backend", "form", "options"), cells())
def test_step_is_that_of_a_rounded_reference(family: str, backend: str, form: str, options: str) -> None:
    quantization = {"format": form, "exclude": EXCLUDED, **({"group_size": 16} if form == "int4" else {})}
    cell = Cell(
        Layout(backend, "", {"fsdp": {"quantization": quantization}}), family, "nll", "ragged", "tokens24", options
    )
    call = (cell.objective.loss_fn, cell.objective.weight_fn)

    def compute() -> Any:
        reference = RoundedReference(cell.path, form, 16, EXCLUDED, temperature=cell.case.temperature)
        step = reference.step(run.samples(), *call)
        return step, reference.forward(run.samples(), ("logprobs",))["logprobs"]

    with start_cell(cell) as run:
        step, logprobs = cached("rounded", (cell.path, form), compute)
        plain = run.expected()[0]
        assert abs(step.loss - plain.loss) > 1e-4 * abs(plain.loss), "rounding must show"
        lengths = [cell.case.lengths[i] for i in run.local_indices]
        actual = rows(run.engine.forward_batch(run.batch()), lengths)
        assert_rows(actual, logprobs, run.local_indices, TOLERANCE)
        result = run.engine.forward_backward(run.batch(), *call)
        assert_number(result.loss, step.loss, TOLERANCE)
        assert_tensors(run.engine.named_gradients(), step.gradients, TOLERANCE)
        assert_number(run.engine.optimizer_step().grad_norm, step.grad_norm, TOLERANCE)
