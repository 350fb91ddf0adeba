"""Shards of a global batch: with any number of samples, loss, gradient and outputs are those of the batch on one rank.

The reference is that of the grid, in float64. One of the loss weights counts sequences, which rows of padding would change.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.api import ParallelDims, TrainEngine
from areal.dispatch.shards import plan_shards
from areal.tests.grid.cases import CUTS, Case, as_input, rows, samples
from areal.tests.grid.cell_engine import CellEngine, start_cell
from areal.tests.grid.compare import assert_rows, assert_step, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.grid.reference import ReferenceStep
from areal.tests.harness.world import cached, record, world

COUNTS = {1: "list", 2: "padded", 3: "list", 7: "padded", 64: "list"}
"""Number of samples of the global batch, and its form."""


def case_of(count: int) -> Case:
    """Return a batch of short sequences, of which every four begin alike."""
    lengths = torch.randint(1, 20, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    begins_like = {i: (i - i % 4, min(lengths[i], lengths[i - i % 4], 6)) for i in range(count) if i % 4}
    weightless = (1,) if count > 2 else ()
    return Case(f"shards{count}", tuple(lengths), weightless=weightless, seed=count, begins_like=begins_like)


def expected_of(run: CellEngine, case: Case) -> tuple[ReferenceStep, dict[str, list[Tensor]]]:
    """Return the reference's step and outputs, cached for all layouts."""
    objective = run.cell.objective

    def compute() -> tuple[ReferenceStep, dict[str, list[Tensor]]]:
        reference, everything = run.reference(), samples(case)
        step = reference.step(everything, objective.loss_fn, objective.weight_fn)
        return step, reference.forward(everything, objective.outputs)

    return cached("shards", (run.cell.path, case), compute)


def by_coordinate(engine: TrainEngine, result: Any) -> list[Any]:
    """Gather the results of the ranks that have the outputs, by data-parallel rank."""
    everyones: list[Any] = [None] * world().size
    dist.all_gather_object(everyones, (engine.dp_rank, result) if engine.is_main else None)
    return [result for _, result in sorted(filter(None, everyones), key=lambda each: each[0])]


def layout(backend: str, *cuts: str) -> list[Any]:
    marks = [pytest.mark.world(ParallelDims.parse(backend).world_size)]
    return [pytest.param(backend, cut, id=f"{backend}-{cut}", marks=marks) for cut in cuts]


@pytest.mark.parametrize(
    ("backend", "cut"),
    [
        *layout("fsdp:d2", "tokens64", "shared40"),
        *layout("megatron:d2", "tokens64"),
        *layout("fsdp:d4", "shared40"),
        *layout("fsdp:d2c2", "tokens64"),
        *layout("megatron:d2p2", "tokens64"),
    ],
)
def test_step_of_all_shards_is_that_of_the_batch(backend: str, cut: str) -> None:
    # As the driver configures its ranks: it divides batches, so that equal shards are equal samples.
    options = {"mb_spec": CUTS[cut].model_copy(update={"equal_batches": "allow"})}
    cell = Cell(Layout(backend, options=options), "qwen3", "terms", cut=cut)
    objective, call = cell.objective, (cell.objective.loss_fn, cell.objective.weight_fn)
    with start_cell(cell) as run:
        engine, errors = run.engine, {}
        for count, form in COUNTS.items():
            case = case_of(count)
            expected, expected_outputs = expected_of(run, case)
            plan = plan_shards(as_input(samples(case), form), engine.config.mb_spec, engine.dp_size)
            shard = plan.shards[engine.dp_rank]

            step = engine.forward_backward(shard, *call, outputs=objective.outputs, returns=objective.outputs)
            assert_step(step, expected, cell.tolerance)
            assert step.n_tokens == sum(case.lengths)
            errors[count] = assert_tensors(engine.named_gradients(), expected.gradients, cell.gradient_tolerance)
            engine.zero_grad()

            # Results of all coordinates, in the caller's order and form.
            forward = plan.merge(by_coordinate(engine, engine.forward_batch(shard, outputs=objective.outputs)))
            of_step = plan.merge_steps(by_coordinate(engine, (step, step.outputs))).outputs
            for name, merged in itertools.product(objective.outputs, (forward, of_step)):
                actual = rows(merged[name], case.lengths)
                assert_rows(actual, expected_outputs[name], range(count), cell.tolerance)
                assert isinstance(merged[name], list) == (form == "list")
    record(
        "shards: errors of gradients by number of samples",
        f"{backend}-{cut}",
        **{str(n): f"{e:.0e}" for n, e in errors.items()},
    )
