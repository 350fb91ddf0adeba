"""Settings of one optimizer step: equal to torch's AdamW with these settings, and gone in the next step."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from areal.api import OptimizerConfig, SaveLoadMeta, StepSettings
from areal.engine.optimizer import ClippingOptimizer, sum_of_squares, torch_optimizer
from areal.tests.dist.faults.twins import infinite_slope
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.harness.tiny import global_batch, local_batch, loss, same_bits, started, weights_of
from areal.tests.harness.world import record

N_STEPS = 20
OPTIMIZER = OptimizerConfig(lr=0.02, eps=1e-4, weight_decay=0.1, gradient_clipping=0.3, lr_scheduler="linear")
VALUES: dict[str, tuple[Any, ...]] = {
    "lr": (0.0, 0.005, 0.01, 0.03),
    "betas": ((0.0, 0.5), (0.8, 0.95), (0.95, 0.9)),
    "eps": (1e-5, 1e-3, 0.1),
    "weight_decay": (0.0, 0.01, 1.0),
    "gradient_clipping": (0.01, 0.1, 1.0, math.inf),
}


def all_settings() -> list[StepSettings | None]:
    """Return the settings of twenty steps. Each sets some of the fields. Every fourth step has no settings."""
    generator = random.Random(0)

    def draw() -> StepSettings:
        names = generator.sample(sorted(VALUES), generator.randint(1, len(VALUES)))
        return StepSettings(**{name: generator.choice(VALUES[name]) for name in names})

    return [None if i % 4 == 3 else draw() for i in range(N_STEPS)]


def cells(*backends: str, **fields: Any) -> list[Any]:
    made = [Cell(Layout(backend), cut="tokens24", **fields) for backend in backends]
    return [pytest.param(cell, id=str(cell), marks=pytest.mark.world(cell.layout.world)) for cell in made]


@pytest.mark.parametrize(
    "cell",
    [
        *cells("fsdp:d1", "megatron:d1", "fsdp:d2", "megatron:t2"),
        *cells("fsdp:d1", options="lora"),
        *cells("megatron:p2", options="lora"),
        # The distributed optimizer of Megatron-Core does not support float64.
        *cells("megatron:d2", dtype="float32"),
    ],
)
def test_twenty_steps_with_changing_settings_track_the_reference(cell: Cell) -> None:
    objective = cell.objective
    call = (objective.loss_fn, objective.weight_fn)
    # In float32, rounding errors grow over twenty steps.
    tolerance = cell.tolerance * (50 if cell.dtype == "float32" else 10)
    with start_cell(cell, OPTIMIZER, total_steps=N_STEPS + 1) as run:
        engine, reference = run.engine, run.reference()
        reference.make_optimizer(OPTIMIZER, total_steps=N_STEPS + 1)
        for number, settings in enumerate(all_settings()):
            reference.step(run.samples(number % 3), *call)
            norm, rate = reference.optimizer_step(settings)
            # A refused step must not change the settings of the next one.
            if number % 6 == 5:
                engine.forward_backward(run.batch(), infinite_slope, normalization="sum")
                refused = engine.optimizer_step(StepSettings(lr=7.0, betas=(0.0, 0.0), gradient_clipping=1e-6))
                assert (refused.update_successful, refused.lr) == (False, 7.0)
            engine.forward_backward(run.batch(number % 3), *call, outputs=objective.outputs)
            stats = engine.optimizer_step(settings)
            assert stats.update_successful
            assert stats.lr == pytest.approx(rate, rel=1e-12)
            assert_number(stats.grad_norm, norm, tolerance)
        expected = {name: x.detach() for name, x in reference.named_parameters()}
        actual = engine.named_tensors() if cell.adapter is None else engine.adapters.named_tensors()
        error = assert_tensors(actual, expected, tolerance)
    record("steps with settings of their own: errors of weights", str(cell), weights=f"{error:.0e}")


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1"])
def test_settings_are_not_in_a_checkpoint(backend: str, tmp_path: Path) -> None:
    def step(engine: Any, settings: StepSettings | None = None) -> None:
        engine.forward_backward(local_batch(engine, global_batch()), loss)
        engine.optimizer_step(settings)

    meta = SaveLoadMeta(tmp_path / "run", weight_format="dcp", with_optim=True)
    with started(backend, optimizer=OPTIMIZER) as engine:
        step(engine, StepSettings(lr=0.1, betas=(0.1, 0.2), eps=0.5, weight_decay=0.7, gradient_clipping=math.inf))
        engine.save(meta)
        step(engine)
        expected = weights_of(engine)
    with started(backend, optimizer=OPTIMIZER) as engine:
        engine.load(meta)
        step(engine)
        assert same_bits(weights_of(engine), expected)


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1"])
def test_setting_that_the_optimizer_does_not_have_raises(backend: str) -> None:
    batch = global_batch()
    with started(backend, optimizer=OptimizerConfig(type="sgd", lr=0.1)) as engine:
        with pytest.raises(RuntimeError, match="no gradient is pending"):
            engine.optimizer_step(StepSettings(lr=0.1))
        engine.forward_backward(batch, loss)
        for settings, message in (
            (StepSettings(betas=(0.1, 0.2)), r"StepSettings.betas = \(0.1, 0.2\) with optimizer.type = 'sgd'"),
            (StepSettings(eps=0.1), r"StepSettings.eps = 0.1 with optimizer.type = 'sgd'"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.optimizer_step(settings)
        # The gradient is still pending.
        assert engine.optimizer_step(StepSettings(lr=0.5, weight_decay=0.1)).lr == 0.5


# ---- a plain optimizer, without an engine

PLAIN = OptimizerConfig(lr=0.01, gradient_clipping=None)


def wrapped(parameters: list[nn.Parameter], inner: Any = None) -> ClippingOptimizer[Any]:
    def norm() -> Tensor:
        return sum_of_squares([p.grad for p in parameters if p.grad is not None], "cpu").sqrt()

    def scale(factor: float) -> None:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)

    return ClippingOptimizer(inner or torch_optimizer(parameters, PLAIN), PLAIN, 100, norm, scale)


def parameters_and_gradients(seed: int) -> tuple[list[nn.Parameter], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 7), (3,)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(x) for x in values], [torch.randn(shape, generator=generator) for shape in shapes]


def test_steps_have_the_bits_of_torch() -> None:
    (mine, _), (theirs, _) = parameters_and_gradients(0), parameters_and_gradients(0)
    optimizer, other = wrapped(mine), torch_optimizer(theirs, PLAIN)
    for step in range(20):
        lr, betas, eps = 0.1 / (step + 1), (0.9 - step / 40, 0.99 - step / 50), 10.0 ** -(step % 13)
        decay, limit = step / 20, (math.inf, 0.5, 3.0)[step % 3]
        for group in other.param_groups:
            group.update(lr=lr, betas=betas, eps=eps, weight_decay=decay)
        for p, q, gradient in zip(mine, theirs, parameters_and_gradients(step)[1], strict=True):
            p.grad, q.grad = gradient.clone(), gradient.clone()
        norm = math.sqrt(sum(q.grad.double().square().sum().item() for q in theirs if q.grad is not None))
        for q in theirs:
            q.grad *= min(1.0, limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
        other.step()
        settings = StepSettings(lr=lr, betas=betas, eps=eps, weight_decay=decay, gradient_clipping=limit)
        assert optimizer.step(settings).lr == lr
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))
    assert optimizer.steps == 20


class Failing(torch.optim.AdamW):
    """An optimizer whose step raises."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("case", ["taken", "refused", "failed"])
def test_groups_are_as_before(case: str) -> None:
    parameters, gradients = parameters_and_gradients(1)
    inner = Failing(parameters) if case == "failed" else torch_optimizer(parameters, PLAIN)
    optimizer = wrapped(parameters, inner)
    before = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in inner.param_groups]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient * (math.inf if case == "refused" else 1.0)
    settings = StepSettings(lr=0.5, betas=(0.1, 0.2), eps=0.3, weight_decay=0.4, gradient_clipping=0.1)
    if case == "failed":
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(settings)
    else:
        assert optimizer.step(settings).update_successful == (case == "taken")
    assert [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups] == before
    assert optimizer.lr == PLAIN.lr


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lr", -0.1, "at least 0"),
        ("lr", math.nan, "finite"),
        ("betas", (0.9, 1.0), "below 1"),
        ("betas", (0.9,), "two numbers"),
        ("betas", (math.nan, 0.9), "below 1"),
        ("eps", 0.0, "above 0"),
        ("eps", math.inf, "finite"),
        ("weight_decay", -1.0, "at least 0"),
        ("weight_decay", math.inf, "finite"),
        ("gradient_clipping", 0.0, "math.inf for a step without clipping"),
        ("gradient_clipping", math.nan, "above 0"),
    ],
)
def test_values_out_of_range_raise(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"StepSettings\.{field} = .*{message}"):
        StepSettings(**{field: value})
