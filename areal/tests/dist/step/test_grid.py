"""Parity grid: for any engine, layout and micro-batch split, a step equals a float64 computation of one sequence at a time.

The cells are a pairwise selection: every layout meets every family, objective, batch, split, option, dtype and empty rank, and so
do these with each other.
"""

import pytest

from areal.tests.grid.agreement import assert_verbs_agree
from areal.tests.grid.layouts import FACTORS, OFTEN, Cell, fits
from areal.tests.grid.pairwise import pairwise_rows

CELLS = [Cell(**row) for row in pairwise_rows(FACTORS, fits, OFTEN)]


def marks(cell: Cell) -> list[pytest.MarkDecorator]:
    if cell.options != "compile":
        return [pytest.mark.world(cell.layout.world)]
    # Ranks take ten seconds to find the graphs of a cell, and a minute with tensor parallelism.
    return [pytest.mark.world(cell.layout.world, timeout=400)]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=marks(cell)) for cell in CELLS])
def test_every_verb_agrees_with_the_reference(cell: Cell) -> None:
    assert_verbs_agree(cell)
