"""Policy losses of tokens and sequences, against their formulas written as loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from areal.tests.unit.losses.losses_world import CU, MASK, batch_of, logprobs, rows, values
from areal.trainer.losses import (
    LOG_RATIO_BOUND,
    PolicyLoss,
    SequenceMean,
    cispo_loss,
    dro_loss,
    gspo_loss,
    gspo_token_loss,
    importance_sampling_loss,
    policy_gradient_loss,
    ppo_clip_loss,
    sapo_loss,
)

INF = math.inf
NEW, OLD, ADVANTAGES = logprobs(2), logprobs(6), values(16)


def clipped(r: float, a: float, low: float, high: float, dual: float | None = None) -> float:
    gain = min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return -(max(gain, dual * a) if dual is not None and a < 0 else gain)


def tokens(formula: Callable[[float, float, float], float]) -> list[float]:
    """Apply a formula of new log-prob, old log-prob and advantage to every trained token."""
    columns = zip(NEW.tolist(), OLD.tolist(), ADVANTAGES.tolist(), MASK.tolist(), strict=True)
    return [formula(n, o, a) if m else 0.0 for n, o, a, m in columns]


def sequences(formula: Callable[[list[int], int], float]) -> list[float]:
    """A formula of a sequence's trained tokens and one of them."""
    out = [0.0] * len(MASK)
    for start, end in rows():
        trained = [t for t in range(start, end) if MASK[t]]
        for t in trained:
            out[t] = formula(trained, t)
    return out


def ratio_of(trained: list[int]) -> float:
    return math.exp(sum((NEW[t] - OLD[t]).item() for t in trained) / len(trained))


def gspo_formula(trained: list[int], t: int) -> float:
    advantage = sum(ADVANTAGES[u].item() for u in trained) / len(trained)
    return clipped(ratio_of(trained), advantage, 0.1, 0.15)


def dro_formula(trained: list[int], t: int) -> float:
    """A share of the square of the sequence's log-ratio; the shares add up to it."""
    total = sum((NEW[u] - OLD[u]).item() for u in trained)
    return -(ADVANTAGES[t] * NEW[t]).item() + 0.35 * (NEW[t] - OLD[t]).item() * total


def cispo_formula(n: float, o: float, a: float) -> float:
    return -min(max(math.exp(n - o), 0.7), 1.4) * a * n


def sapo_formula(n: float, o: float, a: float) -> float:
    tau = 0.8 if a > 0 else 1.7
    return -4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1))) * a


@dataclass(frozen=True)
class Case:
    """A policy loss, its value as a plain formula, and whether a stop-gradient makes its gradient differ from that of its value."""

    loss: Callable[[Tensor, Tensor, Tensor, Tensor], PolicyLoss]
    expected: list[float]
    stops_gradient: bool = False


# One entry per policy loss: every test below runs on it.
CASES = {
    "pg": Case(lambda n, o, a, m: policy_gradient_loss(n, a, m), tokens(lambda n, o, a: -a * n)),
    "is": Case(importance_sampling_loss, tokens(lambda n, o, a: -math.exp(n - o) * a)),
    "ppo": Case(ppo_clip_loss, tokens(lambda n, o, a: clipped(math.exp(n - o), a, 0.2, 0.2))),
    "clip_higher": Case(
        partial(ppo_clip_loss, clip_low=0.1, clip_high=0.4),
        tokens(lambda n, o, a: clipped(math.exp(n - o), a, 0.1, 0.4)),
    ),
    "dual_clip": Case(
        partial(ppo_clip_loss, dual_clip=1.3),
        tokens(lambda n, o, a: clipped(math.exp(n - o), a, 0.2, 0.2, 1.3)),
    ),
    "cispo": Case(partial(cispo_loss, clip_low=0.3, clip_high=0.4), tokens(cispo_formula), stops_gradient=True),
    "dro": Case(partial(dro_loss, beta=0.7), tokens(lambda n, o, a: -a * n + 0.35 * (n - o) ** 2)),
    "dro_sequence": Case(partial(dro_loss, beta=0.7, cu_seqlens=CU), sequences(dro_formula)),
    "sapo": Case(partial(sapo_loss, tau_pos=0.8, tau_neg=1.7), tokens(sapo_formula)),
    "gspo": Case(partial(gspo_loss, cu_seqlens=CU, clip_low=0.1, clip_high=0.15), sequences(gspo_formula)),
    "gspo_token": Case(
        partial(gspo_token_loss, cu_seqlens=CU, clip_low=0.1, clip_high=0.15),
        sequences(lambda trained, t: clipped(ratio_of(trained), ADVANTAGES[t].item(), 0.1, 0.15)),
        stops_gradient=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_policy_loss_equals_formula(name: str) -> None:
    actual = CASES[name].loss(NEW, OLD, ADVANTAGES, MASK).per_token
    torch.testing.assert_close(actual, torch.tensor(CASES[name].expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert not actual[MASK == 0].any()


def test_cases_cover_every_clip_branch() -> None:
    """Both bounds and the dual one act somewhere; otherwise the formulas above prove nothing about them."""
    for name in ("ppo", "clip_higher", "dual_clip", "cispo", "gspo", "gspo_token"):
        stats = CASES[name].loss(NEW, OLD, ADVANTAGES, MASK).stats
        assert stats is not None
        assert stats.clipped_low is not None
        assert stats.clipped_high is not None
        assert stats.clipped_low.any(), name
        assert stats.clipped_high.any(), name
        assert not (stats.clipped_low | stats.clipped_high)[MASK == 0].any()
        assert (stats.ratio[MASK == 0] == 1).all()
    dual = CASES["dual_clip"].loss(NEW, OLD, ADVANTAGES, MASK).stats
    assert dual is not None
    assert dual.dual_clipped is not None
    expected = (MASK > 0) & (ADVANTAGES < 0) & ((NEW - OLD).exp() > 1.3)
    assert torch.equal(dual.dual_clipped, expected)
    assert expected.any()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.stops_gradient])
def test_gradient_equals_numerical_gradient(name: str) -> None:
    fn = CASES[name].loss
    assert torch.autograd.gradcheck(lambda x: fn(x, OLD, ADVANTAGES, MASK).per_token, (NEW.clone().requires_grad_(),))


def gradient(name: str, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor = MASK) -> Tensor:
    new = new.clone().requires_grad_()
    CASES[name].loss(new, old, advantages, mask).per_token.sum().backward()
    assert new.grad is not None
    return new.grad


def test_stop_gradient_losses_have_gradients_of_the_papers() -> None:
    """CISPO: minus the clipped ratio times A. GSPO-token: minus the sequence's ratio times A, unless the clip holds it."""
    expected = tokens(lambda n, o, a: -min(max(math.exp(n - o), 0.7), 1.4) * a)
    torch.testing.assert_close(gradient("cispo", NEW, OLD, ADVANTAGES), torch.tensor(expected, dtype=torch.float64))

    def kept(trained: list[int], t: int) -> float:
        s, a = ratio_of(trained), ADVANTAGES[t].item()
        return 0.0 if (a > 0 and s > 1.15) or (a < 0 and s < 0.9) else -s * a

    expected = sequences(kept)
    assert 0.0 in [expected[t] for t in range(len(MASK)) if MASK[t]]
    torch.testing.assert_close(
        gradient("gspo_token", NEW, OLD, ADVANTAGES), torch.tensor(expected, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "gspo"])
def test_gradient_at_ratio_one_equals_policy_gradient(name: str) -> None:
    torch.testing.assert_close(gradient(name, OLD, OLD, ADVANTAGES), -ADVANTAGES * MASK, rtol=1e-12, atol=0)


def test_gspo_equals_gspo_token_for_equal_advantages() -> None:
    """In value and gradient, under the mean over sequences; and at a ratio of one with the policy gradient."""
    per_sequence = values(9, len(CU) - 1)
    advantages = torch.repeat_interleave(per_sequence, CU.diff())
    batch = batch_of()
    for old in (OLD, NEW):
        actual = []
        for name in ("gspo", "gspo_token", "pg"):
            new = NEW.clone().requires_grad_()
            loss = SequenceMean().total(CASES[name].loss(new, old, advantages, MASK).per_token, batch)
            loss.backward()
            actual.append((loss.detach(), new.grad))
        torch.testing.assert_close(actual[0], actual[1])
    torch.testing.assert_close(actual[0][1], actual[2][1])


def test_unbounded_clip_equals_importance_sampling() -> None:
    plain = importance_sampling_loss(NEW, OLD, ADVANTAGES, MASK).per_token
    open_clip = ppo_clip_loss(NEW, OLD, ADVANTAGES, MASK, clip_low=INF, clip_high=INF)
    assert torch.equal(open_clip.per_token, plain)
    assert open_clip.stats is not None
    assert not open_clip.stats.clipped_low.any()  # type: ignore[union-attr]


def test_special_cases_reduce_to_simpler_losses() -> None:
    ones = torch.arange(len(MASK) + 1, dtype=torch.int32)
    ppo = ppo_clip_loss(NEW, OLD, ADVANTAGES, MASK).per_token
    for fn in (gspo_loss, gspo_token_loss):
        of_one = fn(NEW, OLD, ADVANTAGES, MASK, ones, clip_low=0.2, clip_high=0.2).per_token
        torch.testing.assert_close(of_one, ppo)
    assert torch.equal(ppo_clip_loss(NEW, OLD, ADVANTAGES, MASK, dual_clip=1e6).per_token, ppo)
    pg = policy_gradient_loss(NEW, ADVANTAGES, MASK).per_token
    assert torch.equal(dro_loss(NEW, OLD, ADVANTAGES, MASK, beta=0.0).per_token, pg)
    of_one = dro_loss(NEW, OLD, ADVANTAGES, MASK, beta=0.3, cu_seqlens=ones).per_token
    torch.testing.assert_close(of_one, dro_loss(NEW, OLD, ADVANTAGES, MASK, beta=0.3).per_token)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("junk", [math.nan, INF, -INF])
def test_masked_tokens_do_not_affect_loss_or_gradient(name: str, junk: float) -> None:
    fn = CASES[name].loss
    dirty = [x.masked_fill(MASK == 0, junk) for x in (NEW, OLD, ADVANTAGES)]
    assert torch.equal(fn(*dirty, MASK).per_token, fn(NEW, OLD, ADVANTAGES, MASK).per_token)
    assert torch.equal(gradient(name, *dirty), gradient(name, NEW, OLD, ADVANTAGES))
    assert not gradient(name, *dirty)[MASK == 0].any()


@pytest.mark.parametrize("name", CASES)
def test_half_precision_upcasts_to_float32_and_float64_stays(name: str) -> None:
    fn = CASES[name].loss
    half = [x.bfloat16() for x in (NEW, OLD, ADVANTAGES)]
    actual = fn(*half, MASK.bool()).per_token
    assert actual.dtype == torch.float32
    assert fn(NEW, OLD, ADVANTAGES, MASK).per_token.dtype == torch.float64
    assert torch.equal(actual, fn(*(x.float() for x in half), MASK.float()).per_token)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("dro")])
def test_extreme_log_ratio_gives_finite_loss(name: str) -> None:
    far = OLD.clone()
    far[1], far[4] = -1e4, 1e4
    loss = CASES[name].loss(NEW.float(), far.float(), ADVANTAGES.float(), MASK)
    assert loss.per_token.isfinite().all()
    assert gradient(name, NEW.float(), far.float(), ADVANTAGES.float()).isfinite().all()
    if loss.stats is not None:
        assert loss.stats.ratio.max() <= math.exp(LOG_RATIO_BOUND) * 1.001


@pytest.mark.parametrize("name", CASES)
def test_old_logprobs_and_advantages_have_no_gradient(name: str) -> None:
    leaves = [x.clone().requires_grad_() for x in (NEW, OLD, ADVANTAGES)]
    CASES[name].loss(*leaves, MASK).per_token.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None
