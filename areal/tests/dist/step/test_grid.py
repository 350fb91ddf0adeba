"""Parity grid: for any engine, layout and micro-batch split, a step equals a float64 computation of one sequence at a time.

The cells are a pairwise selection: layouts meet families, objectives, batches, splits, options, dtypes and empty ranks, and these meet
each other.
"""

import pytest

from areal.tests.grid.agreement import assert_verbs_agree
from areal.tests.grid.cells import grid_cells
from areal.tests.grid.layouts import Cell


def marks(cell: Cell) -> list[pytest.MarkDecorator]:
    if cell.options != "compile":
        return [pytest.mark.world(cell.layout.world)]
    # Ranks take ten seconds to find the graphs of a cell, and a minute with tensor parallelism.
    return [pytest.mark.world(cell.layout.world, timeout=400)]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=marks(cell)) for cell in grid_cells()])
def test_every_verb_agrees_with_the_reference(cell: Cell) -> None:
    assert_verbs_agree(cell)
