"""Distillation on top-k targets against loops, and its bounds against the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from areal.tests.unit.losses.losses_world import CU, MASK, samples, step, values
from areal.trainer.losses import distill_objective, forward_kl_loss, reverse_kl_loss

V, K = 9, 4
STUDENT, TEACHER = values(1, len(MASK), V).log_softmax(-1), values(2, len(MASK), V).log_softmax(-1)
IDS = TEACHER.topk(K).indices
IDS[4, 2:] = -100
FULL = torch.arange(V).expand(len(MASK), V)


def pick(x: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of ``ids``, 0.0 where there is none, as an engine gives them."""
    return torch.where(ids >= 0, x.gather(1, ids.clamp(min=0)), 0.0)


P, Q = pick(STUDENT, IDS), pick(TEACHER, IDS)


def expected(direction: str, *, rest: bool) -> list[float]:
    out = []
    for t, m in enumerate(MASK.tolist()):
        used = [k for k in range(K) if IDS[t, k] >= 0]
        p, q = ([math.exp(x[t, k].item()) for k in used] for x in (P, Q))
        if rest:
            p, q = p + [1 - sum(p)], q + [1 - sum(q)]
        a, b = (q, p) if direction == "forward" else (p, q)
        out.append(m * sum(x * math.log(x / y) for x, y in zip(a, b, strict=True)))
    return out


@pytest.mark.parametrize("case", ["forward", "forward_without_rest", "reverse"])
def test_distill_loss_equals_formula(case: str) -> None:
    rest = case != "forward_without_rest"
    direction = case.split("_")[0]

    def loss(p: Tensor) -> Tensor:
        if direction == "reverse":
            return reverse_kl_loss(p, Q, IDS, MASK).per_token
        return forward_kl_loss(p, Q, IDS, MASK, rest=rest).per_token

    torch.testing.assert_close(loss(P), torch.tensor(expected(direction, rest=rest), dtype=torch.float64))
    assert torch.autograd.gradcheck(loss, (P.clone().requires_grad_(),))


@pytest.mark.parametrize("fn", [forward_kl_loss, reverse_kl_loss])
def test_top_k_divergence_is_bounded_by_full_vocabulary(fn) -> None:
    student = STUDENT.clone().requires_grad_()
    a, b = (TEACHER, student) if fn is forward_kl_loss else (student, TEACHER)
    full = (a.exp() * (a - b)).sum(-1) * MASK
    actual = fn(student, TEACHER, FULL, MASK)
    torch.testing.assert_close(actual.per_token, full)
    top_k = fn(P, Q, IDS, MASK).per_token
    assert (top_k <= full + 1e-12).all()
    assert (top_k[MASK > 0] > 0).all()
    assert not fn(Q, Q, IDS, MASK).per_token.any()


@pytest.mark.parametrize("fn", [forward_kl_loss, reverse_kl_loss])
def test_zero_remaining_mass_in_float32_is_finite(fn) -> None:
    leaf = STUDENT.float().requires_grad_()
    loss = fn(leaf, TEACHER.bfloat16(), FULL, MASK).per_token
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("fn", [forward_kl_loss, reverse_kl_loss])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_and_missing_targets_do_not_affect_loss(fn, junk: float) -> None:
    outside = (MASK == 0)[:, None] | (IDS < 0)
    leaf = P.masked_fill(outside, junk).requires_grad_()
    actual = fn(leaf, Q.masked_fill(outside, junk), IDS, MASK)
    actual.per_token.sum().backward()
    clean = fn(P, Q, IDS, MASK)
    for x, y in zip(actual, clean, strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=0, atol=0)
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[outside].any()


def test_zero_teacher_probability_is_finite() -> None:
    """The limit of ``q log q`` is 0."""
    q = Q.clone()
    q[1, 0] = -math.inf
    leaf = P.clone().requires_grad_()
    loss = forward_kl_loss(leaf, q, IDS, MASK).per_token
    loss.sum().backward()
    assert loss.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_masses_sum_top_k_probabilities() -> None:
    actual = forward_kl_loss(P, Q, IDS, MASK)
    for x, mass in ((Q, actual.teacher_mass), (P, actual.student_mass)):
        torch.testing.assert_close(mass, (x.exp() * (IDS >= 0)).sum(-1) * MASK)


def test_distill_objective_metrics_and_target_shape() -> None:
    actual = step(distill_objective(), samples(k=3), n_mbs=2)
    assert actual.metrics["distill/kl"] > 0
    assert 0 < actual.metrics["distill/student_mass"] < 1
    with pytest.raises(ValueError, match=r"target_ids has shape .* \[T, K\]"):
        step(distill_objective(), samples())


@pytest.mark.parametrize(
    ("options", "field"),
    [({"direction": "sideways"}, "direction = 'sideways'"), ({"direction": "reverse", "rest": False}, "rest = False")],
)
def test_invalid_options_raise(options: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        distill_objective(**options)


def test_batch_has_missing_targets() -> None:
    assert len(CU) == 6
    assert (IDS < 0).any()
    assert MASK[4] == 1
