"""Starts the engine of a cell and hands it its part of the batch, with the reference beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from areal.api import FinetuneSpec, OptimizerConfig, TrainEngine
from areal.engine.registry import create_engine
from areal.tests.grid.cases import as_input, samples, share
from areal.tests.grid.layouts import Cell
from areal.tests.grid.lift import float64_everywhere
from areal.tests.grid.models import value_head
from areal.tests.grid.reference import Reference, ReferenceStep
from areal.tests.harness.world import cached

STAND_STILL = OptimizerConfig(lr=0.0, gradient_clipping=None)
"""Takes optimizer steps that change nothing."""


@dataclass(frozen=True)
class Running:
    """An engine at work on a cell."""

    cell: Cell
    engine: TrainEngine

    def samples(self, seed: int = 0) -> list[dict[str, Tensor]]:
        """The global batch."""
        return samples(self.cell.case, top_targets=self.cell.objective.top_targets, seed=seed)

    @property
    def mine(self) -> list[int]:
        """This rank's sequences of it, in the order in which they are passed."""
        return share(self.cell.case, self.engine.dp_rank, self.engine.dp_size)

    def batch(self, seed: int = 0) -> Any:
        """This rank's part, as a caller passes it."""
        everything = self.samples(seed)
        return as_input([everything[i] for i in self.mine], self.cell.case.form)

    def reference(self) -> Reference:
        """A fresh reference on the same weights."""
        path = self.cell.path
        head = value_head(path) if self.cell.objective.value_head else None
        return Reference(path, temperature=self.cell.case.temperature, value_head=head, adapter=self.cell.adapter)

    def expected(self) -> tuple[ReferenceStep, dict[str, list[Tensor]]]:
        """The step and the outputs of the global batch. Computed once in a session for all layouts, cuts and dtypes."""
        cell, objective = self.cell, self.cell.objective

        def compute() -> tuple[ReferenceStep, dict[str, list[Tensor]]]:
            reference = self.reference()
            step = reference.step(self.samples(), objective.loss_fn, objective.weight_fn)
            return step, reference.forward(self.samples(), objective.outputs)

        return cached("reference", (cell.path, cell.adapter, cell.case_name, cell.objective_name), compute)


@contextmanager
def running(cell: Cell, optimizer: OptimizerConfig = STAND_STILL, total_steps: int = 100) -> Iterator[Running]:
    """The engine of a cell, initialized; destroyed at the end. Float64 all through where the cell's dtype is."""
    engine = create_engine(cell.config(optimizer))
    with float64_everywhere() if cell.dtype == "float64" else nullcontext():
        engine.initialize(FinetuneSpec(total_train_steps=total_steps))
        with engine:
            if cell.adapter is not None:
                engine.adapters.load(engine.adapters.selected, cell.adapter)
            yield Running(cell, engine)
