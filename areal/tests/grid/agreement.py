"""Agreement of every verb of an engine with the float64 reference, in one cell of the grid."""

from __future__ import annotations

from areal.tests.grid.cases import rows
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_step, assert_tensors
from areal.tests.grid.layouts import Cell
from areal.tests.harness.world import record


def assert_verbs_agree(cell: Cell) -> None:
    """Run every verb of a cell's engine, compare it with the reference, and record the errors."""
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
