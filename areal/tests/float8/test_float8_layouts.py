"""Float8 products: outputs and gradients of every layout are those of one process with one sequence at a time."""

from __future__ import annotations

import statistics
from importlib.util import find_spec
from typing import Any

import pytest
from torch import Tensor

if find_spec("torchao") is None:
    pytest.skip("torchao is not installed: make test-torchao", allow_module_level=True)

from areal.api import ParallelDims
from areal.tests.grid.cases import rows
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_rows
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.harness.references.float8_reference import Float8Reference
from areal.tests.harness.world import cached

TOLERANCE = 2e-5
# Sums of products depend on the number of rows in the last bit, so that an operand may round to the neighbouring float8 number. A difference d
# of the gradient of a layer becomes one of about sqrt(d / 16) in the layer below.
GRADIENT_TOLERANCE = 2e-2
INVARIANT = ("rowwise_with_gw_hp", "mxfp8_with_gw_hp")
SIZES = {
    "qwen3": {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"head_dim": 16, "hidden_size": 64, "moe_intermediate_size": 32},
}
LAYOUTS = {
    "qwen3": ("fsdp:d1", "fsdp:d2", "fsdp:c2", "fsdp:p2", "fsdp:d2c2"),
    "qwen3_moe": ("fsdp:d1", "fsdp:e2", "fsdp:d2e2"),
}


def cells() -> list[Any]:
    params, turn = [], 0
    for family, layouts in LAYOUTS.items():
        for backend in layouts:
            world = ParallelDims.parse(backend).world_size
            for recipe in INVARIANT if world == 1 else [INVARIANT[turn % 2]]:
                options = "recompute" if world > 1 and turn % 2 else "plain"
                id = f"{family}-{backend}-{recipe}"
                params.append(pytest.param(family, backend, recipe, options, id=id, marks=pytest.mark.world(world)))
            turn += 1
    compiled = ("qwen3", "fsdp:d1", INVARIANT[0], "compile")
    return [*params, pytest.param(*compiled, id="qwen3-fsdp:d1-compile", marks=pytest.mark.world(1))]


def distance(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double().cpu() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("family", "backend", "recipe", "options"), cells())
def test_step_does_not_depend_on_the_layout(family: str, backend: str, recipe: str, options: str) -> None:
    float8 = {"recipe": recipe, "emulate": True}
    layout = Layout(backend, options={"fsdp": {"float8": float8}}, changes=SIZES[family])
    cell = Cell(layout, family, "nll", "ragged", "tokens24", options, "float32")
    call = (cell.objective.loss_fn, cell.objective.weight_fn)

    def compute() -> Any:
        reference = Float8Reference(cell.path, recipe, ("gate",), temperature=cell.case.temperature)
        step = reference.step(run.samples(), *call)
        return step, reference.forward(run.samples(), ("logprobs",))["logprobs"]

    with start_cell(cell) as run:
        step, logprobs = cached("float8", (cell.path, recipe), compute)
        plain = run.expected()[0]
        lengths = [cell.case.lengths[i] for i in run.local_indices]
        actual = rows(run.engine.forward_batch(run.batch()), lengths)
        assert_rows(actual, logprobs, run.local_indices, TOLERANCE)
        result = run.engine.forward_backward(run.batch(), *call)
        assert abs(result.loss - step.loss) < TOLERANCE * abs(step.loss)
        assert abs(result.loss - plain.loss) > 10 * TOLERANCE * abs(plain.loss), "float8 must show"
        gradients = {name: grad.cpu() for name, grad in run.engine.named_gradients()}
        errors = {name: distance(grad, step.gradients[name]) for name, grad in gradients.items()}
        assert gradients.keys() == step.gradients.keys()
        wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= GRADIENT_TOLERANCE}
        assert not wrong, f"errors above {GRADIENT_TOLERANCE:.0e}: {wrong}"
        rounding = [distance(grad, plain.gradients[name]) for name, grad in gradients.items()]
        assert statistics.median(rounding) > 2 * GRADIENT_TOLERANCE, "float8 must show in gradients"


@pytest.mark.parametrize(
    "backend", [pytest.param(f"fsdp:{x}", marks=pytest.mark.world(n)) for x, n in (("d1", 1), ("e2", 2))]
)
def test_experts_train_in_every_layout(backend: str) -> None:
    recipe, family = "mxfp8_with_gw_hp", "qwen3_moe"
    options = {"fsdp": {"float8": {"recipe": recipe, "emulate": True, "experts": True}}}
    cell = Cell(
        Layout(backend, options=options, changes=SIZES[family]),
        family,
        "nll",
        "ragged",
        "tokens24",
        "plain",
        "bfloat16",
    )
    with start_cell(cell) as run:
        plain = run.expected()[0]
        result = run.engine.forward_backward(run.batch(), cell.objective.loss_fn, cell.objective.weight_fn)
        assert abs(result.loss - plain.loss) < cell.tolerance * abs(plain.loss)
        assert all(grad.any() for name, grad in run.engine.named_gradients() if ".experts." in name)
