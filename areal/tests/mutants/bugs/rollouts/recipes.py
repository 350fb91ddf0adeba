"""Bugs of recipes that the documentation's programs must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

PAGE = "unit/project/test_docs.py::test_code_blocks_run[docs/{}.md]"


@mutant("areal.recipes.run:Run._add_evaluation", PAGE.format("run-directory"))
def evaluations_of_a_run_are_not_logged(right: Function) -> Function:
    """Evaluations are computed, and no tracker receives them."""

    def wrong(self: Any) -> None:
        self.results.add(self.trainer.step, self.evaluate())

    return wrong


@mutant("areal.recipes.data.rows:DataRows.taken", PAGE.format("datasets"))
def held_out_rows_are_trained_on(right: Function) -> Function:
    """Rows for evaluation, and rows to train on, are all rows."""
    return lambda self, indices: self
