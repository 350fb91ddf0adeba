"""Starts the engine of a grid cell with its shard of the batch, and computes the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from areal.api import FinetuneSpec, OptimizerConfig, TrainEngine
from areal.engine.registry import create_engine
from areal.tests.grid.cases import as_input, dp_shard_indices, samples
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.layouts import Cell
from areal.tests.grid.models import value_head
from areal.tests.grid.reference import Reference, ReferenceStep
from areal.tests.harness.world import cached

ZERO_LR = OptimizerConfig(lr=0.0, gradient_clipping=None)
"""Optimizer whose steps do not change the weights."""


@dataclass(frozen=True)
class CellEngine:
    """A started engine of a cell."""

    cell: Cell
    engine: TrainEngine

    def samples(self, seed: int = 0) -> list[dict[str, Tensor]]:
        """Return the global batch."""
        return samples(self.cell.case, top_targets=self.cell.objective.top_targets, seed=seed)

    @property
    def local_indices(self) -> list[int]:
        """Indices of this rank's sequences in the global batch, in the order in which they are passed."""
        return dp_shard_indices(self.cell.case, self.engine.dp_rank, self.engine.dp_size, self.cell.empty_rank)

    def batch(self, seed: int = 0) -> Any:
        """Return this rank's shard in the caller's form."""
        everything = self.samples(seed)
        return as_input([everything[i] for i in self.local_indices], self.cell.case.form, like=everything[0])

    def reference(self) -> Reference:
        """Return a new reference with the same weights."""
        path = self.cell.path
        head = value_head(path) if self.cell.objective.value_head else None
        return Reference(path, temperature=self.cell.case.temperature, value_head=head, adapter=self.cell.adapter)

    def expected(self) -> tuple[ReferenceStep, dict[str, list[Tensor]]]:
        """Return the reference's step and outputs of the global batch, cached over all layouts, splits and dtypes of a session."""
        cell, objective = self.cell, self.cell.objective

        def compute() -> tuple[ReferenceStep, dict[str, list[Tensor]]]:
            reference = self.reference()
            step = reference.step(self.samples(), objective.loss_fn, objective.weight_fn)
            return step, reference.forward(self.samples(), objective.outputs)

        return cached("reference", (cell.path, cell.adapter, cell.case_name, cell.objective_name), compute)


@contextmanager
def start_cell(cell: Cell, optimizer: OptimizerConfig = ZERO_LR, total_steps: int = 100) -> Iterator[CellEngine]:
    """Start the engine of a cell and destroy it at the end, in float64 mode if the cell's dtype is float64."""
    engine = create_engine(cell.config(optimizer))
    with float64_everywhere() if cell.dtype == "float64" else nullcontext():
        engine.initialize(FinetuneSpec(total_train_steps=total_steps))
        with engine:
            if cell.adapter is not None:
                engine.adapters.load(engine.adapters.selected, cell.adapter)
            yield CellEngine(cell, engine)
