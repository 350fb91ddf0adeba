"""Several calls in a row: accumulated gradients, optimizer steps with clipping and schedule, and custom loops."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import pytest
from torch import Tensor

from areal.api import MicroBatch, Normalization, OptimizerConfig, TokenOutputs
from areal.tests.grid.cases import as_input, rows
from areal.tests.grid.cell_engine import CellEngine, start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_tensors
from areal.tests.grid.layouts import Cell, Layout, all_layouts
from areal.tests.harness.world import record

TABLE = "several calls in a row: errors"

CONSTANT = OptimizerConfig(lr=0.03, gradient_clipping=None, eps=1e-4, weight_decay=0.1)
CLIPPED = {
    "adamw-cosine": OptimizerConfig(
        lr=0.03,
        gradient_clipping=0.3,
        eps=1e-4,
        weight_decay=0.1,
        lr_scheduler="cosine",
        warmup_steps=2,
        min_lr_ratio=0.1,
    ),
    "sgd-wsd": OptimizerConfig(
        type="sgd", momentum=0.9, lr=0.3, gradient_clipping=0.3, weight_decay=0.1, lr_scheduler="wsd", decay_ratio=0.8
    ),
}
"""``eps`` is large enough for the update to be a smooth function of the gradient: AdamW's default turns rounding into signs."""


def cells(*, family: str, **fields: Any) -> list[Any]:
    """Return a cell for each layout, with this family if the layout supports it."""
    made = [
        Cell(layout, family=layout.family if family in layout.refuses else family, **fields) for layout in all_layouts()
    ]
    return [pytest.param(cell, id=cell.layout.name, marks=pytest.mark.world(cell.layout.world)) for cell in made]


def rotating(values: Mapping[str, Any], **fields: Any) -> list[Any]:
    """Return a cell for each layout, with the values in turn; an engine's first layout gets all of them."""
    turn, seen = cycle(values), set()
    made = []
    for param in cells(**fields):
        (cell,) = param.values
        names = [next(turn)] if cell.layout.engine in seen else list(values)
        seen.add(cell.layout.engine)
        made += [pytest.param(cell, values[name], id=f"{name}-{param.id}", marks=param.marks) for name in names]
    return made


def a_third(params: list[Any], turn: int) -> list[Any]:
    """Return the cells of cheap layouts, and each third of the others: each of these takes one of the tests below.

    Cheap are layouts of at most two ranks. JAX compiles programs for each layout and test: of its layouts, the one of one rank, and those
    of four ranks take none.
    """

    def costs_much(layout: Layout) -> bool:
        return layout.world > (1 if layout.engine == "jax" else 2)

    names = [layout.name for layout in all_layouts() if costs_much(layout)]
    layouts = [param.values[0].layout for param in params]
    return [
        param
        for param, layout in zip(params, layouts, strict=True)
        if not costs_much(layout)
        or (names.index(layout.name) % 3 == turn and (layout.engine, layout.world) != ("jax", 4))
    ]


def weights_agree(run: CellEngine, reference_weights: dict[str, Tensor]) -> float:
    """Compare all weights with the reference's."""
    return assert_tensors(run.engine.named_tensors(), reference_weights, run.cell.tolerance)


@pytest.mark.parametrize(
    ("cell", "optimizer"),
    a_third(rotating(CLIPPED, family="qwen3_moe", objective_name="terms", case_name="zero_rank", cut="tokens24"), 0),
)
def test_three_steps_track_the_reference(cell: Cell, optimizer: OptimizerConfig) -> None:
    objective = cell.objective
    call = (objective.loss_fn, objective.weight_fn)
    with start_cell(cell, optimizer, total_steps=4) as run:
        reference = run.reference()
        reference.make_optimizer(optimizer, total_steps=4)
        worst = 0.0
        for seed in range(3):
            expected = reference.step(run.samples(seed), *call)
            norm, rate = reference.optimizer_step()
            assert norm > 0.3, "clipping has nothing to do"
            assert run.engine.lr == pytest.approx(rate, rel=1e-12)
            step = run.engine.train_batch(run.batch(seed), *call, outputs=objective.outputs)
            assert step.update_successful
            assert step.lr == pytest.approx(rate, rel=1e-12)
            worst = max(worst, assert_number(step.grad_norm, norm, cell.tolerance))
            assert step.loss == pytest.approx(expected.loss, rel=cell.tolerance)
        error = weights_agree(run, dict(reference.named_tensors()))
    record(TABLE, f"three steps, {optimizer.type}, {cell}", weights=f"{error:.0e}", norm=f"{worst:.0e}")


@pytest.mark.parametrize(
    ("cell", "normalization"),
    a_third(
        rotating(
            {"sum": "sum", "number": 40.0, "weight": "weight"},
            family="gemma3_text",
            objective_name="policy",
            case_name="starved",
            cut="mbs3",
        ),
        1,
    ),
)
def test_accumulated_calls_equal_one_batch(cell: Cell, normalization: Normalization) -> None:
    """With ``sum`` or a number the batch is cut over calls; with ``weight`` the calls get complete batches, scaled by ``loss_weight``."""
    objective = cell.objective
    call = (objective.loss_fn, objective.weight_fn)
    with start_cell(cell, CONSTANT) as run:
        reference = run.reference()
        reference.make_optimizer(CONSTANT, total_steps=100)
        if normalization == "weight":
            for seed, scale in enumerate((0.5, -2.0)):
                expected = reference.step(run.samples(seed), *call, loss_weight=scale)
                step = run.engine.forward_backward(run.batch(seed), *call, outputs=objective.outputs, loss_weight=scale)
                assert step.loss == pytest.approx(expected.loss, rel=cell.tolerance)
        else:
            divide_by = 1.0 if normalization == "sum" else float(normalization)
            expected = reference.step(run.samples(), *call, divide_by=divide_by)
            losses = [
                run.engine.forward_backward(batch, *call, outputs=objective.outputs, normalization=normalization).loss
                for batch in split_over_calls(run, 3)
            ]
            assert sum(losses) == pytest.approx(expected.loss, rel=cell.tolerance)
        gradients = assert_tensors(run.engine.named_gradients(), expected.gradients, cell.tolerance)
        norm, _ = reference.optimizer_step()
        assert_number(run.engine.optimizer_step().grad_norm, norm, cell.tolerance)
        weights = weights_agree(run, dict(reference.named_tensors()))
        with pytest.raises(RuntimeError, match="no gradient"):
            run.engine.optimizer_step()
    record(TABLE, f"calls by {normalization}, {cell}", gradients=f"{gradients:.0e}", weights=f"{weights:.0e}")


def split_over_calls(run: CellEngine, n: int) -> list[Any]:
    """Split this rank's shard over ``n`` calls; a rank that has too few sequences passes weightless ones."""
    everything = run.samples()
    batches = []
    for first in range(n):
        chosen = [everything[i] for i in run.local_indices[first::n]]
        if not chosen:
            spare = everything[run.local_indices[0]]
            chosen = [{**spare, "loss_mask": spare["loss_mask"] * 0}]
        batches.append(as_input(chosen, run.cell.case.form))
    return batches


@pytest.mark.parametrize(
    "cell", a_third(cells(family="qwen2", objective_name="nll", case_name="starved", cut="tokens24"), 2)
)
def test_custom_loop_equals_train_batch(cell: Cell) -> None:
    objective = cell.objective
    with start_cell(cell, CONSTANT) as run:
        expected, expected_outputs = run.expected()
        mbs = run.engine.microbatches(run.batch())
        total = run.engine.global_weight(mbs, objective.weight_fn)
        assert total.item() == expected.weights["loss"]

        def process(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            loss, _ = objective.loss_fn(outputs, mb.data)
            loss = loss / total
            return loss, {
                "loss": loss.detach(),
                "logprobs": outputs.logprobs.detach(),
                "length": mb.data["cu_seqlens"].diff(),
            }

        results = run.engine.forward_backward_batch(mbs, process, outputs=objective.outputs)
        assert len(results) == len(mbs.real)
        gradients = assert_tensors(run.engine.named_gradients(), expected.gradients, cell.tolerance)

        losses = [result["loss"] for result in results]
        local_loss = sum(losses[1:], losses[0]).double()
        assert run.engine.global_sum(local_loss).item() == pytest.approx(expected.loss, rel=cell.tolerance)
        restored = mbs.restore([{key: result[key] for key in ("logprobs", "length")} for result in results])
        lengths = [cell.case.lengths[i] for i in run.local_indices]
        assert restored["length"].tolist() == lengths
        assert_rows(
            rows(restored["logprobs"], lengths), expected_outputs["logprobs"], run.local_indices, cell.tolerance
        )
        assert_number(run.engine.optimizer_step().grad_norm, expected.grad_norm, cell.tolerance)
        by_hand = {name: tensor.clone() for name, tensor in run.engine.named_tensors()}
    with start_cell(cell, CONSTANT) as run:
        run.engine.train_batch(run.batch(), objective.loss_fn, objective.weight_fn, outputs=objective.outputs)
        weights = weights_agree(run, {name: tensor.double().cpu() for name, tensor in by_hand.items()})
    record(TABLE, f"a loop of one's own, {cell}", gradients=f"{gradients:.0e}", weights=f"{weights:.0e}")
