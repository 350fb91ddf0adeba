"""Each loss has the value and the gradient of its published formula in float64, and losses are sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal.tests.unit.tinker.backends.conftest import Start
from areal.tests.unit.tinker.backends.reference import (
    STEP,
    Reference,
    data,
    gradients,
    request,
    run,
    same,
    scaled,
    trained,
)
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import Datum, PassResult
from areal.tinker.backends.training.engine_backend import EngineBackend

Formula = Callable[[Tensor, dict[str, Tensor]], Tensor]
RATIO = ("logprobs", "advantages")


def cross_entropy(p: Tensor, x: dict[str, Tensor]) -> Tensor:
    return (-p * x["weights"]).sum()


def importance_sampling(p: Tensor, x: dict[str, Tensor]) -> Tensor:
    return -(torch.exp(p - x["logprobs"]) * x["advantages"]).sum()


def ppo(low: Any, high: Any) -> Formula:
    def formula(p: Tensor, x: dict[str, Tensor]) -> Tensor:
        ratio = torch.exp(p - x["logprobs"])
        bounds = [
            x.get(f"clip_{side}_threshold", torch.tensor(bound, dtype=torch.float64))
            for side, bound in (("low", low), ("high", high))
        ]
        return -torch.min(ratio * x["advantages"], torch.clamp(ratio, *bounds) * x["advantages"]).sum()

    return formula


def cispo(low: float, high: float) -> Formula:
    def formula(p: Tensor, x: dict[str, Tensor]) -> Tensor:
        ratio = torch.clamp(torch.exp(p - x["logprobs"]), low, high)
        return -(ratio.detach() * p * x["advantages"]).sum()

    return formula


def dro(beta: float) -> Formula:
    return lambda p, x: -(p * x["advantages"] - 0.5 * beta * (p - x["logprobs"]) ** 2).sum()


def gspo(low: float, high: float) -> Formula:
    def formula(p: Tensor, x: dict[str, Tensor]) -> Tensor:
        log_ratio = (p.detach() - x["logprobs"])[x["sequence_ratio_mask"] != 0].mean()
        ratio = torch.exp(log_ratio + p - p.detach())
        return -torch.min(ratio * x["advantages"], torch.clamp(ratio, low, high) * x["advantages"]).sum()

    return formula


CASES: dict[str, tuple[str, tuple[str, ...], Formula, dict[str, float]]] = {
    "cross_entropy": ("cross_entropy", ("weights",), cross_entropy, {}),
    "importance_sampling": ("importance_sampling", RATIO, importance_sampling, {}),
    "ppo": ("ppo", RATIO, ppo(0.8, 1.2), {}),
    "ppo_wide": ("ppo", RATIO, ppo(0.3, 2.5), {"clip_low_threshold": 0.3, "clip_high_threshold": 2.5}),
    "ppo_of_tokens": ("ppo", (*RATIO, "clip_low_threshold"), ppo(0.0, 1.2), {}),
    "cispo": ("cispo", RATIO, cispo(0.0, 4.0), {}),
    "cispo_tight": ("cispo", RATIO, cispo(0.8, 1.2), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "dro": ("dro", RATIO, dro(0.05), {}),
    "dro_strong": ("dro", RATIO, dro(0.7), {"beta": 0.7}),
    "gspo": ("gspo", (*RATIO, "sequence_ratio_mask"), gspo(1 - 3e-4, 1 + 4e-4), {}),
    "gspo_wide": (
        "gspo",
        (*RATIO, "sequence_ratio_mask"),
        gspo(0.5, 1.5),
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    ),
}


@pytest.fixture(scope="module")
def exact(start: Start) -> EngineBackend:
    """A backend in float64 with one model whose layers of all kinds are trained."""
    made = start(dtype="float64", max_tokens_per_mb=48)
    trained(made, "a:train:0")
    return made


@pytest.fixture(scope="module")
def reference(exact: EngineBackend, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    exact.save_for_sampler("a:train:0", folder)
    return Reference(folder, scale=32 / 4)


def check(
    exact: EngineBackend, reference: Reference, samples: list[Datum], formula: Formula, loss: str, **config: float
) -> PassResult:
    """Compare value, log-probs and gradient of one request with a formula."""
    result = run(exact, request("a:train:0", samples, loss, **config))
    mine = gradients(exact, "a:train:0")
    exact.group.zero_grad()
    exact.models["a:train:0"].pending = False
    logprobs = [reference.logprobs(sample) for sample in samples]
    total = torch.zeros((), dtype=torch.float64)
    for p, sample in zip(logprobs, samples, strict=True):
        total = total + formula(p, {name: torch.tensor(x).double() for name, x in sample.values.items()})
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-9)
    for actual, expected in zip(result.logprobs, logprobs, strict=True):
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-6)
    for name, expected in reference.gradients(total).items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-7, atol=1e-9 * expected.abs().max().item() + 1e-12)
    return result


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(exact: EngineBackend, reference: Reference, name: str) -> None:
    loss, names, formula, config = CASES[name]
    samples = data(*names)
    if name == "ppo_of_tokens":
        samples = scaled(samples, 0.1, "clip_low_threshold")
        samples = [
            Datum(x.input_ids, x.target_ids, {**x.values, "clip_low_threshold": np.abs(x.values["clip_low_threshold"])})
            for x in samples
        ]
    result = check(exact, reference, samples, formula, loss, **config)
    # Names with one suffix, which the client merges by.
    assert all(len(key.split(":")) == 2 for key in result.metrics)
    assert (
        set(result.metrics) == {"loss:sum"}
        if loss == "cross_entropy"
        else {"ratio:mean", "kl:mean"} < set(result.metrics)
    )
    # A forward has the same result without a gradient.
    forward = exact.forward([request("a:train:0", samples, loss, **config)])[0]
    assert isinstance(forward, PassResult)
    assert forward.metrics == pytest.approx(result.metrics, rel=1e-12)
    assert all(np.array_equal(a, b) for a, b in zip(forward.logprobs, result.logprobs, strict=True))


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "gspo"])
def test_targets_of_several_tokens_at_a_position(exact: EngineBackend, reference: Reference, loss: str) -> None:
    """Data with 3, 1 and no such dimension are in one request, each with outputs of its shape."""
    _, names, formula, config = CASES["gspo_wide" if loss == "gspo" else loss]
    samples = [*data(*names, targets=3), *data(*names, targets=1, lengths=(5,)), *data(*names, lengths=(9, 2))]
    result = check(exact, reference, samples, formula, loss, **config)
    assert [x.shape for x in result.logprobs] == [sample.target_ids.shape for sample in samples]


def test_clipped_counts_targets_with_an_advantage(exact: EngineBackend, reference: Reference) -> None:
    samples = data(*RATIO)
    samples[1] = scaled(samples[1:2], 0.0, "advantages")[0]
    result = run(exact, request("a:train:0", samples, "cispo", clip_low_threshold=0.8, clip_high_threshold=1.2))
    kept = [sample for sample in samples if sample.values["advantages"].any()]
    logs = torch.cat([reference.logprobs(x).detach() - torch.tensor(x.values["logprobs"]) for x in kept])
    outside = ((logs.exp() < 0.8) | (logs.exp() > 1.2)).double()
    assert result.metrics["clipped:mean"] == pytest.approx(outside.mean().item())
    assert result.metrics["ratio:mean"] == pytest.approx(logs.exp().mean().item())
    assert result.metrics["kl:mean"] == pytest.approx(-logs.mean().item())
    exact.optim_step("a:train:0", STEP)


# ---- sums


def test_accumulated_requests_equal_one_request(backend: EngineBackend) -> None:
    model, samples = trained(backend, "a"), data("weights")
    whole = run(backend, request(model, samples)), gradients(backend, model)
    backend.optim_step(model, STEP)
    trained(backend, "b")
    parts = [run(backend, request("b", samples[:2])), run(backend, request("b", samples[2:]))]
    assert sum(each.metrics["loss:sum"] for each in parts) == pytest.approx(whole[0].metrics["loss:sum"], rel=1e-6)
    for name, gradient in gradients(backend, "b").items():
        torch.testing.assert_close(gradient, whole[1][name], rtol=1e-4, atol=1e-4 * float(whole[1][name].abs().max()))


def test_loss_is_not_normalised(backend: EngineBackend) -> None:
    """Weights × 8 give the gradient × 8 to the bit, also with negative weights; × 10 up to rounding."""
    trained(backend, "a")
    once = run(backend, request("a", data("weights"))), gradients(backend, "a")
    for factor, tolerance in ((8.0, 0.0), (10.0, 1e-4)):
        backend.group.zero_grad()
        backend.models["a"].pending = False
        result = run(backend, request("a", scaled(data("weights"), factor)))
        assert result.metrics["loss:sum"] == pytest.approx(factor * once[0].metrics["loss:sum"], rel=1e-5)
        for name, gradient in gradients(backend, "a").items():
            expected = factor * once[1][name]
            torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_weight_of_zero_is_a_request_without_effect(backend: EngineBackend) -> None:
    """Log-probs are returned, and the next gradient is the same to the bit."""
    for model in ("a", "b"):
        trained(backend, model)
    without = run(backend, request("a", data("weights", seed=1))), gradients(backend, "a")
    nothing = run(backend, request("b", scaled(data("weights"), 0.0)))
    assert nothing.metrics == {"loss:sum": 0.0}
    assert all(x.any() for x in nothing.logprobs)
    assert not any(x.any() for x in gradients(backend, "b").values())
    run(backend, request("b", data("weights", seed=1)))
    assert same(gradients(backend, "b"), without[1])


def test_custom_loss_of_a_client_equals_the_loss_in_the_engine(backend: EngineBackend) -> None:
    """The client differentiates by log-probs and sends the negative gradient as weights."""
    samples = data(*RATIO)
    trained(backend, "a")
    run(backend, request("a", samples, "ppo"))
    inside = gradients(backend, "a")
    trained(backend, "b")
    forward = backend.forward([request("b", scaled(data("weights"), 0.0))])[0]
    assert isinstance(forward, PassResult)
    surrogate = []
    for p, sample in zip(forward.logprobs, samples, strict=True):
        leaf = torch.tensor(p, requires_grad=True)
        ppo(0.8, 1.2)(leaf.double(), {name: torch.tensor(x).double() for name, x in sample.values.items()}).backward()
        assert leaf.grad is not None
        surrogate.append(Datum(sample.input_ids, sample.target_ids, {"weights": -leaf.grad.numpy()}))
    run(backend, request("b", surrogate))
    for name, gradient in gradients(backend, "b").items():
        torch.testing.assert_close(gradient, inside[name], rtol=1e-5, atol=1e-6 * float(inside[name].abs().max()))


# ---- refused


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("stable_reinforce", {}, "loss_fn = 'stable_reinforce': choose one of cross_entropy, .* gspo"),
        (
            "ppo",
            {"clip_lo": 0.5},
            "'ppo' has the key 'clip_lo': known keys are clip_high_threshold, clip_low_threshold",
        ),
        ("cross_entropy", {"beta": 0.5}, "has the key 'beta': known keys are none"),
        ("dro", {"beta": "big"}, "beta = 'big': it must be a number"),
        ("dro", {"beta": -1.0}, "beta = -1.0: it must be finite and at least 0"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold = 1.5 and clip_high_threshold = 1.2"),
        ("cispo", {"clip_high_threshold": float("nan")}, "0 <= low <= high"),
        ("gspo", {"clip_low_threshold": -0.1}, "0 <= low <= high"),
    ],
)
def test_configurations_are_refused(backend: EngineBackend, loss: str, config: dict[str, Any], message: str) -> None:
    trained(backend, "a", steps=0)
    names = () if loss == "stable_reinforce" else sorted(backend.losses()[loss]["inputs"] - {"target_tokens"})
    for call in (backend.forward, backend.forward_backward):
        with pytest.raises(UserError, match=message):
            raise call([request("a", data(*names), loss, **config)])[0]  # type: ignore[misc]


def test_values_that_a_loss_needs(backend: EngineBackend, tmp_path: Path) -> None:
    trained(backend, "a", steps=0)
    with pytest.raises(UserError, match=r"data\[0\].loss_fn_inputs has no 'advantages', which the loss needs"):
        raise backend.forward([request("a", data("logprobs"), "ppo")])[0]  # type: ignore[misc]
    samples = scaled(data(*RATIO, "sequence_ratio_mask"), 0.0, "sequence_ratio_mask")
    with pytest.raises(UserError, match=r"data\[0\].*'sequence_ratio_mask'\] marks no token"):
        raise backend.forward([request("a", samples, "gspo")])[0]  # type: ignore[misc]
    assert backend.losses()["gspo"] == {
        "inputs": {"target_tokens", "logprobs", "advantages", "sequence_ratio_mask"},
        "optional": {"clip_low_threshold", "clip_high_threshold"},
        "config": {"clip_low_threshold", "clip_high_threshold"},
    }


def test_cross_entropy_without_weights_has_weights_of_one(backend: EngineBackend) -> None:
    """Also if some samples of a request have weights."""
    trained(backend, "a")
    given = data("weights")
    ones = [Datum(x.input_ids, x.target_ids, {"weights": np.ones_like(x.values["weights"])}) for x in given]
    none = [Datum(x.input_ids, x.target_ids, {}) for x in given]
    for some, same_as in ((none, ones), ([given[0], *none[1:]], [given[0], *ones[1:]])):
        results = []
        for samples in (some, same_as):
            results.append((run(backend, request("a", samples)).metrics, gradients(backend, "a")))
            backend.group.zero_grad()
            backend.models["a"].pending = False
        assert results[0][0] == results[1][0]
        assert same(results[0][1], results[1][1])
