"""Parity grid: for any engine, layout and micro-batch split, a step equals a float64 computation of one sequence at a time.

The cells are a pairwise selection: every layout meets every family, objective, batch, split, option, dtype and empty rank, and so
do these with each other.
"""

import pytest

from areal.tests.grid.cases import rows
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_step, assert_tensors
from areal.tests.grid.layouts import FACTORS, OFTEN, Cell, fits
from areal.tests.grid.pairwise import pairwise_rows
from areal.tests.harness.world import record

CELLS = [Cell(**row) for row in pairwise_rows(FACTORS, fits, OFTEN)]


def marks(cell: Cell) -> list[pytest.MarkDecorator]:
    if cell.options != "compile":
        return [pytest.mark.world(cell.layout.world)]
    # Ranks take ten seconds to find the graphs of a cell, and a minute with tensor parallelism.
    return [pytest.mark.world(cell.layout.world, timeout=400)]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=marks(cell)) for cell in CELLS])
def test_every_verb_agrees_with_the_reference(cell: Cell) -> None:
    objective, tolerance = cell.objective, cell.tolerance
    call = (objective.loss_fn, objective.weight_fn)
    with start_cell(cell) as run:
        engine, batch = run.engine, run.batch()
        expected, expected_outputs = run.expected()

        loss = assert_step(engine.eval_batch(batch, *call, outputs=objective.outputs), expected, tolerance)

        actual = engine.forward_batch(batch, outputs=objective.outputs)
        by_name = actual if len(objective.outputs) > 1 else {objective.outputs[0]: actual}
        step = engine.forward_backward(batch, *call, outputs=objective.outputs, returns=objective.outputs)
        assert_step(step, expected, tolerance)
        lengths = [cell.case.lengths[i] for i in run.local_indices]
        outputs = max(
            assert_rows(rows(found[name], lengths), expected_outputs[name], run.local_indices, tolerance)
            for name in objective.outputs
            for found in (by_name, step.outputs)
        )

        assert step.n_tokens == sum(cell.case.lengths)
        gradients = assert_tensors(engine.named_gradients(), expected.gradients, cell.gradient_tolerance)

        stats = engine.optimizer_step()
        assert stats.update_successful
        norm = assert_number(stats.grad_norm, expected.grad_norm, tolerance)

        again = engine.train_batch(batch, *call, outputs=objective.outputs)
        assert_step(again, expected, tolerance)
        assert_number(again.grad_norm, expected.grad_norm, tolerance)
    errors = {"loss": loss, "outputs": outputs, "gradients": gradients, "norm": norm}
    record(
        "invariance grid: cells and their errors", str(cell), **{name: f"{error:.0e}" for name, error in errors.items()}
    )
