"""KL estimators: their values, and which gradient each has in expectation, over a whole small distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from areal.tests.unit.losses.losses_world import CU, MASK, logprobs
from areal.trainer.losses import KL_ESTIMATORS, KLEstimator, KLTerm, kl_k3, kl_metrics

NEW, REF = logprobs(1), logprobs(2)
FORMULAS = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_estimate_equals_formula(name: KLEstimator) -> None:
    expected = [FORMULAS[name]((r - n).item()) if m else 0.0 for n, r, m in zip(NEW, REF, MASK, strict=True)]
    fn = KL_ESTIMATORS[name]
    torch.testing.assert_close(fn(NEW, REF, MASK), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: fn(x, REF, MASK), (NEW.clone().requires_grad_(),))
    metric = kl_metrics(NEW, REF, MASK)[f"kl_ref/{name}"]
    assert metric.value == pytest.approx(sum(expected) / MASK.sum())
    assert metric.weight == MASK.sum()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_masked_tokens_do_not_affect_estimate(name: KLEstimator) -> None:
    fn = KL_ESTIMATORS[name]
    for junk in (math.nan, math.inf, -math.inf):
        dirty = NEW.masked_fill(MASK == 0, junk).requires_grad_()
        loss = fn(dirty, REF.masked_fill(MASK == 0, junk), MASK)
        loss.sum().backward()
        assert torch.equal(loss, fn(NEW, REF, MASK))
        assert dirty.grad is not None
        assert not dirty.grad[MASK == 0].any()
        assert dirty.grad.isfinite().all()


LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
OTHER = torch.tensor([-0.5, 0.4, 0.2, 0.9], dtype=torch.float64).log_softmax(0)
SAMPLER = torch.tensor([0.9, -0.3, 0.1, 0.5], dtype=torch.float64).log_softmax(0)


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum()


def gradient_of_kl(direction: str) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    p = logits.log_softmax(0)
    (kl(p, OTHER) if direction == "reverse" else kl(OTHER, p)).backward()
    assert logits.grad is not None
    return logits.grad


def expected_gradient(term: KLTerm, sampler: Tensor) -> Tensor:
    """Of the loss term, over all outcomes, each as often as the sampler draws it."""
    logits = LOGITS.clone().requires_grad_()
    per_outcome = term.per_token(logits.log_softmax(0), OTHER, torch.ones(4), sampler)
    (sampler.exp() * per_outcome).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_k1_and_k3_are_unbiased_and_k2_is_biased() -> None:
    p = LOGITS.log_softmax(0)
    means = {name: (p.exp() * fn(p, OTHER, torch.ones(4))).sum() for name, fn in KL_ESTIMATORS.items()}
    torch.testing.assert_close(means["k1"], kl(p, OTHER))
    torch.testing.assert_close(means["k3"], kl(p, OTHER))
    assert abs(means["k2"] - kl(p, OTHER)) > 1e-3


def test_expected_on_policy_gradient_of_each_estimator() -> None:
    """On-policy: k1: 0, k2: that of the reverse KL, k3: that of the forward KL."""
    on_policy = LOGITS.log_softmax(0)
    actual = {name: expected_gradient(KLTerm(1.0, name), on_policy) for name in KL_ESTIMATORS}
    torch.testing.assert_close(actual["k1"], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(actual["k2"], gradient_of_kl("reverse"))
    torch.testing.assert_close(actual["k3"], gradient_of_kl("forward"))
    assert not torch.allclose(actual["k3"], gradient_of_kl("reverse"), atol=1e-3)


@pytest.mark.parametrize("name", ["k1", "k3"])
@pytest.mark.parametrize("sampler", [LOGITS.log_softmax(0), SAMPLER], ids=["on_policy", "off_policy"])
def test_weighted_k1_and_k3_have_reverse_kl_gradient(name: KLEstimator, sampler: Tensor) -> None:
    term = KLTerm(1.0, name, importance_weighted=True)
    torch.testing.assert_close(expected_gradient(term, sampler), gradient_of_kl("reverse"))


def test_term_equals_coefficient_times_estimate() -> None:
    torch.testing.assert_close(KLTerm(0.3).per_token(NEW, REF, MASK, None), 0.3 * kl_k3(NEW, REF, MASK))
    with pytest.raises(ValueError, match="importance_weighted"):
        KLTerm(0.3, importance_weighted=True).per_token(NEW, REF, MASK, None)


def test_k3_far_from_reference_is_finite_with_gradient() -> None:
    """The slope is 1 if the policy is likelier than the reference by e**100."""
    new = torch.tensor([-1.0, -101.0], requires_grad=True)
    loss = kl_k3(new, torch.tensor([-101.0, -1.0]), torch.ones(2))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad is not None
    assert new.grad.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"coef": 1.0, "clamp": 0.0}, "KLTerm.clamp = 0.0"),
        ({"coef": -0.1}, "coef"),
        ({"coef": math.nan}, "coef"),
        ({"coef": 1.0, "estimator": "k4"}, "k4"),
    ]
    + [({"coef": 1.0, "old": "olds"}, "olds")],
)
def test_invalid_options_raise(options: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        KLTerm(**options)


def test_mask_has_empty_and_long_sequences() -> None:
    sums = [MASK[a:b].sum().item() for a, b in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True)]
    assert 0 in sums
    assert max(sums) > 2
