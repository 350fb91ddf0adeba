"""AdamW with bfloat16 moments: single steps, unbiased rounding, and a long run of small updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from areal.api import OptimizerConfig, TrainEngineConfig
from areal.utils import bf16_adamw
from areal.utils.bf16_adamw import BFloat16AdamW

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def test_first_step_equals_torch_adamw() -> None:
    weights = [nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.linspace(3, -2, 12)
    BFloat16AdamW(weights[:1], **OPTIONS).step()
    torch.optim.AdamW(weights[1:], **OPTIONS).step()
    assert torch.allclose(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def test_stochastic_rounding_is_unbiased_and_bounded() -> None:
    value = torch.cat([torch.randn(50, generator=torch.Generator().manual_seed(1)) * 10.0**k for k in range(-6, 3)])
    value = torch.cat([value, torch.tensor([0.0, 1.0, -1.0, float("inf")])])
    out, total = torch.empty_like(value, dtype=torch.bfloat16), torch.zeros_like(value, dtype=torch.float64)
    generator, n = torch.Generator().manual_seed(2), 4000
    for _ in range(n):
        bf16_adamw._round(out, value, generator)
        unit = value.abs() * 2**-7
        assert bool(((out.float() - value).abs() <= unit).logical_or(out.float() == value).all())
        total += out.double()
    finite = value[:-1].double()
    # Five standard errors of the mean of n values that differ by at most one unit in the last place.
    assert bool(((total[:-1] / n - finite).abs() <= 5 * finite.abs() * 2**-8 / n**0.5 + 1e-12).all())
    assert torch.equal(out[-4:], value[-4:].bfloat16())


def long_run(optimizer_of: Any) -> tuple[float, Tensor]:
    """Take 2,000 small updates on noisy gradients of a quadratic. Returns the final second moment too."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(400, generator=generator)
    weight = nn.Parameter(torch.zeros(400))
    optimizer = optimizer_of([weight])
    for step in range(2000):
        # The gradient shrinks, and the second moment must decrease with it.
        weight.grad = (weight.detach() - target) + 0.3 * 0.999**step * torch.randn(400, generator=generator)
        optimizer.step()
    return float((weight.detach() - target).norm()), optimizer.state[weight]["exp_avg_sq"].float()


def test_long_run_of_small_updates_tracks_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**OPTIONS, "lr": 2e-3, "weight_decay": 0.0}
    exact, exact_second = long_run(lambda p: torch.optim.AdamW(p, **options))
    actual, actual_second = long_run(lambda p: BFloat16AdamW(p, **options))
    monkeypatch.setattr(bf16_adamw, "_round", lambda out, value, generator: out.copy_(value))
    _, nearest_second = long_run(lambda p: BFloat16AdamW(p, **options))

    def error(second: Tensor) -> float:
        return float((second - exact_second).norm() / exact_second.norm())

    assert actual == pytest.approx(exact, rel=0.1)
    assert error(actual_second) < 0.1
    assert error(nearest_second) > 3 * error(actual_second)  # rounding to nearest would leave the value unchanged


def test_rounding_noise_depends_on_seed_step_and_shard() -> None:
    def moments(seed: int, steps: int = 3) -> Tensor:
        weight = nn.Parameter(torch.zeros(64))
        optimizer = BFloat16AdamW([weight], **OPTIONS, seed=seed)
        for step in range(steps):
            weight.grad = torch.linspace(0.1, 0.2, 64) * (step + 1)
            optimizer.step()
        return optimizer.state[weight]["exp_avg"].clone()

    assert torch.equal(moments(1), moments(1))
    assert not torch.equal(moments(1), moments(2))


@pytest.mark.parametrize(
    "changes", [{"optimizer": OptimizerConfig(type="sgd")}, {"master_dtype": "float64", "grad_reduce_dtype": "float64"}]
)
def test_bf16_moments_with_unsupported_optimizer_raise(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "path": "model",
        "optimizer": OptimizerConfig(),
        "fsdp": {"optimizer_state_dtype": "bfloat16"},
    }
    with pytest.raises(ValueError, match="optimizer_state_dtype = 'bfloat16' with"):
        TrainEngineConfig(**{**fields, **changes})
