"""Evaluation between the calls of a step: pending gradients do not change, and no stale weight is used."""

import dataclasses
from typing import Any

import pytest

from areal.api import OptimizerConfig
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_step, assert_tensors
from areal.tests.grid.layouts import Cell, all_layouts

OPTIMIZER = OptimizerConfig(lr=0.05, gradient_clipping=None, eps=1e-4)
CHOSEN = (
    (
        ("fsdp:d1", "fsdp:d2", "fsdp:c2-ulysses", "fsdp:p2v2-ZBVZeroBubble", "megatron:d2", "megatron:p2v2"),
        ("plain",),
        "float64",
    ),
    (
        ("fsdp:d1", "fsdp:d2", "fsdp:c2-ulysses", "fsdp:p2v2-ZBVZeroBubble"),
        ("keep_gathered",),
        "float64",
    ),
    (
        ("megatron:d2", "megatron:d2p2"),
        ("plain", "overlap"),
        "float32",
    ),
)
"""Layouts, options and dtype of some cells."""


def case(cell: Cell) -> Any:
    name = f"{cell.layout.name}-{cell.options}-{cell.dtype}"
    return pytest.param(cell, id=name, marks=pytest.mark.world(cell.layout.world))


CELLS = [
    case(Cell(layout, family="qwen3_tied", cut="tokens24", options=option, dtype=dtype))
    for names, options, dtype in CHOSEN
    for layout in all_layouts()
    for option in options
    if layout.name in names
]


@pytest.mark.parametrize("cell", CELLS)
def test_eval_between_calls_changes_nothing(cell: Cell) -> None:
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    with start_cell(cell, OPTIMIZER) as run:
        engine, reference = run.engine, run.reference()
        reference.make_optimizer(OPTIMIZER, total_steps=100)
        for seed in range(2):
            batch = run.batch(seed)
            engine.forward_backward(batch, *call)
            engine.forward_batch(batch)
            before = engine.eval_batch(batch, *call)
            assert_step(before, reference.step(run.samples(seed), *call), cell.tolerance)
            engine.optimizer_step()
            reference.optimizer_step()
            after = engine.eval_batch(batch, *call)
            assert after.loss != before.loss, "the step changed nothing"
            again = engine.eval_batch(batch, *call)
            assert dataclasses.replace(again, seconds=after.seconds, timings=after.timings) == after
        # zero_grad discards all pending gradients even if the last call was a forward only.
        engine.forward_backward(run.batch(5), *call)
        engine.forward_batch(run.batch(5))
        engine.zero_grad()
        engine.train_batch(run.batch(2), *call)
        reference.step(run.samples(2), *call)
        reference.optimizer_step()
        # AdamW amplifies rounding differences of a gradient.
        tolerance = cell.tolerance if cell.dtype == "float64" else 2e-4
        assert_tensors(engine.named_tensors(), dict(reference.named_tensors()), tolerance)
