"""Learning rates compared with closed forms, and the optimizer step that applies them."""

from __future__ import annotations

import math

import pytest
import torch

from areal.api import OptimizerConfig
from areal.engine.optimizer import ClippingOptimizer, lr_factor, torch_optimizer

TOTAL = 20


def factors(total: int = TOTAL, **fields: object) -> list[float]:
    config = OptimizerConfig(**fields)
    return [lr_factor(step, config, total) for step in range(total + 3)]


def test_warmup_is_linear_and_ends_at_one() -> None:
    for scheduler in ("constant", "linear", "cosine", "wsd"):
        assert factors(warmup_steps=4, lr_scheduler=scheduler)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_schedule() -> None:
    assert set(factors()) == {1.0}
    assert factors(warmup_steps=2)[2:] == [1.0] * (TOTAL + 1)


def test_linear_schedule() -> None:
    assert factors(lr_scheduler="linear") == pytest.approx([max(0.0, 1 - i / TOTAL) for i in range(TOTAL + 3)])
    result = factors(lr_scheduler="linear", warmup_steps=5, min_lr_ratio=0.2)
    assert result[5:] == pytest.approx([0.2 + 0.8 * max(0.0, 1 - i / 15) for i in range(18)])


def test_cosine_schedule() -> None:
    result = factors(lr_scheduler="cosine", warmup_steps=4, min_lr_ratio=0.1)
    after = [0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, i / 16))) / 2 for i in range(19)]
    assert result[4:] == pytest.approx(after)
    assert result[12] == pytest.approx(0.55)


def test_wsd_schedule_is_constant_then_decays() -> None:
    result = factors(lr_scheduler="wsd", warmup_steps=2, decay_ratio=0.25, min_lr_ratio=0.5)
    assert result[:2] == [0.5, 1.0]
    assert result[2:16] == [1.0] * 14
    assert result[16:21] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
    assert result[21:] == [0.5, 0.5]


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "wsd"])
def test_lr_stays_at_minimum_after_last_step(scheduler: str) -> None:
    config = OptimizerConfig(lr_scheduler=scheduler, min_lr_ratio=0.3)
    assert lr_factor(10 * TOTAL, config, TOTAL) == pytest.approx(0.3)
    assert all(0.3 <= factor <= 1 for factor in factors(lr_scheduler=scheduler, min_lr_ratio=0.3))


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "wsd"])
def test_warmup_as_long_as_the_run_is_valid(scheduler: str) -> None:
    assert factors(lr_scheduler=scheduler, warmup_steps=TOTAL)[:TOTAL] == [(i + 1) / TOTAL for i in range(TOTAL)]


def make(weight: torch.nn.Parameter, **fields: object) -> ClippingOptimizer:
    config = OptimizerConfig(**{"type": "sgd", "lr": 1.0, "weight_decay": 0.0, "gradient_clipping": None, **fields})
    return ClippingOptimizer(
        torch_optimizer([weight], config),
        config,
        4,
        global_norm=lambda: weight.grad.norm(),
        scale_grads=lambda factor: weight.grad.mul_(factor),
    )


def test_clipping_keeps_direction_and_limits_norm() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    stats = make(weight, gradient_clipping=1.0).step()
    assert (stats.grad_norm, stats.update_successful) == (5.0, True)
    assert weight.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)
    weight.grad = torch.tensor([0.3, 0.4])
    make(weight, gradient_clipping=1.0).step()
    assert weight.tolist() == pytest.approx([-0.9, -1.2], rel=1e-5), "a short gradient stays as it is"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gradient_skips_update_and_schedule(bad: float) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make(weight, lr_scheduler="linear", momentum=0.9)
    for good in (True, False, True):
        weight.grad = torch.tensor([1.0, 1.0 if good else bad])
        before, steps, rate = weight.detach().clone(), optimizer.steps, optimizer.lr
        stats = optimizer.step()
        assert stats.lr == rate
        assert stats.update_successful is good
        assert optimizer.steps == steps + good
        assert torch.equal(weight, before) is not good
    assert optimizer.lr == 0.5


def test_optimizer_state_dict_resumes_schedule() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    one = make(weight, lr_scheduler="linear")
    weight.grad = torch.ones(2)
    one.step()
    one.set_lr(3.0)
    other = make(weight, lr_scheduler="linear")
    other.load_state_dict(one.state_dict())
    assert other.lr == one.lr == pytest.approx(3.0 * 0.75)


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0])
def test_set_lr_raises_on_invalid_value(lr: float) -> None:
    with pytest.raises(ValueError, match=f"lr = {lr}"):
        make(torch.nn.Parameter(torch.ones(1))).set_lr(lr)


def test_changed_settings_take_effect_and_a_set_rate_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    one = make(weight, momentum=0.9)
    one.set_lr(3.0)
    state = one.state_dict()
    for fields, lr, named in (
        ({"momentum": 0.9}, 3.0, ""),
        ({"momentum": 0.5}, 3.0, "momentum = 0.5 (saved: 0.9)"),
        ({"momentum": 0.9, "lr": 0.5}, 0.5, "lr = 0.5 (saved: 1.0)"),
    ):
        caplog.clear()
        other = make(weight, **fields)
        other.load_state_dict(state)
        assert other.lr == lr
        assert [record.getMessage().endswith(f"effect: {named}") for record in caplog.records] == [True] * bool(named)
    # States of earlier releases are without settings.
    other.load_state_dict({"steps": 2, "base_lr": 3.0})
    assert (other.steps, other.lr) == (2, 3.0)


@pytest.mark.parametrize(
    ("scheduler", "ratio", "named"), [("linear", 0.0, 1), ("linear", 0.1, 0), ("constant", 0.0, 0)]
)
def test_steps_after_the_schedule_are_named_once(
    scheduler: str, ratio: float, named: int, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make(weight, lr_scheduler=scheduler, **({"min_lr_ratio": ratio} if ratio else {}))
    for step in range(7):
        weight.grad = torch.ones(2)
        optimizer.step()
        assert len(caplog.records) == (named if step >= 4 else 0)
    assert all("step 5 has a learning rate of 0" in record.getMessage() for record in caplog.records)
    assert all("total_train_steps = 4" in record.getMessage() for record in caplog.records)
