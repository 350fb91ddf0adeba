"""Optimizer steps of a model are torch's AdamW, and a gradient that is not finite changes nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from areal.tests.unit.tinker.backends.reference import (
    STEP,
    data,
    datum,
    gradients,
    request,
    run,
    same,
    trained,
    weights,
)
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdamParams, Datum
from areal.tinker.backends.training.engine_backend import EngineBackend


def steep() -> list[Datum]:
    """Data with a finite loss, whose gradient overflows."""
    sample = datum(2, 0)
    return [dataclasses.replace(sample, values={"weights": np.array([3e37, -3e37], dtype=np.float32)})]


def test_steps_equal_torchs_adamw(backend: EngineBackend) -> None:
    """Settings change with each step. Two steps are without a gradient, and decay weights and moments."""
    trained(backend, "a", steps=0)
    settings = [
        AdamParams(),
        AdamParams(0.02, weight_decay=0.1),
        AdamParams(0.02, weight_decay=0.5),  # without a gradient
        AdamParams(0.01, beta1=0.5, beta2=0.99, eps=1e-6, grad_clip_norm=0.25),
        AdamParams(0.0, weight_decay=0.3),
        AdamParams(0.03),  # without a gradient
        AdamParams(0.01, grad_clip_norm=1e9),
    ]
    mine = {name: x.double().requires_grad_() for name, x in weights(backend, "a").items()}
    optimizer = torch.optim.AdamW(mine.values(), lr=1.0)
    for number, params in enumerate(settings):
        empty = number in (2, 5)
        if not empty:
            run(backend, request("a", data("weights", seed=number)))
            for name, gradient in gradients(backend, "a").items():
                mine[name].grad = gradient.double()
        for name in mine if empty else ():
            mine[name].grad = torch.zeros_like(mine[name])
        norm = math.sqrt(sum(float(x.grad.square().sum()) for x in mine.values()))
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(list(mine.values()), params.grad_clip_norm)
        betas = (params.beta1, params.beta2)
        fields = {"lr": params.learning_rate, "betas": betas, "eps": params.eps, "weight_decay": params.weight_decay}
        optimizer.param_groups[0].update(fields)
        optimizer.step()
        assert backend.optim_step("a", params) == {"grad_norm:mean": pytest.approx(norm, rel=1e-6)}
        for name, x in weights(backend, "a").items():
            torch.testing.assert_close(x.double(), mine[name].detach(), rtol=1e-5, atol=1e-7)


def test_gradient_that_is_not_finite_changes_nothing(backend: EngineBackend) -> None:
    for model in "ab":
        trained(backend, model, rank=1, steps=2)
    before = weights(backend, "a")
    result = run(backend, request("a", steep()))
    assert math.isfinite(result.metrics["loss:sum"])
    with pytest.raises(UserError, match=r"optim_step: the gradient is not finite"):
        backend.optim_step("a", STEP)
    assert same(weights(backend, "a"), before)
    # The moments, too: further steps are those of a model without that request, and the gradient is gone.
    for number in range(2):
        for model in "ab":
            run(backend, request(model, data("weights", seed=number)))
            backend.optim_step(model, STEP)
    assert same(weights(backend, "a"), weights(backend, "b"))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (AdamParams(-1e-4), "adam_params.learning_rate = -0.0001: it must be finite and at least 0"),
        (AdamParams(float("nan")), "adam_params.learning_rate = nan"),
        (AdamParams(beta1=1.0), "adam_params.beta1 = 1.0: it must be at least 0 and below 1"),
        (AdamParams(eps=0.0), "adam_params.eps = 0.0: it must be finite and above 0"),
        (AdamParams(weight_decay=math.inf), "adam_params.weight_decay = inf"),
        (AdamParams(grad_clip_norm=-1.0), "adam_params.grad_clip_norm = -1.0: it must be at least 0; 0 does not clip"),
    ],
)
def test_settings_of_a_step_are_refused(backend: EngineBackend, params: AdamParams, message: str) -> None:
    trained(backend, "a", steps=0)
    run(backend, request("a", data("weights")))
    with pytest.raises(UserError, match=message):
        backend.optim_step("a", params)
    assert backend.models["a"].pending
