"""Cross-entropy and the critic's loss, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from areal.tests.unit.losses.losses_world import MASK, logprobs, samples, step, values
from areal.trainer.losses import cross_entropy_loss, sft_objective, value_loss, value_objective

V, OLD, RETURNS = values(1), values(1) + values(2, scale=0.4), values(3)


@pytest.mark.parametrize("clip", [None, 0.0, 0.2, 1e6])
def test_value_loss_equals_formula(clip: float | None) -> None:
    expected, clipped = [], []
    for v, old, ret, m in zip(V.tolist(), OLD.tolist(), RETURNS.tolist(), MASK.tolist(), strict=True):
        plain = (v - ret) ** 2
        kept = plain if clip is None else (min(max(v, old - clip), old + clip) - ret) ** 2
        expected.append(m * max(plain, kept) / 2)
        clipped.append(bool(m) and kept > plain)
    actual = value_loss(V, RETURNS, MASK, old_values=OLD, clip=clip)
    torch.testing.assert_close(actual.per_token, torch.tensor(expected, dtype=torch.float64))
    if clip in (None, 0.2):
        assert actual.clipped.tolist() == clipped
    assert any(clipped) == (clip in (0.0, 0.2))
    if clip != 0.0:
        leaf = V.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x: value_loss(x, RETURNS, MASK, old_values=OLD, clip=clip).per_token, (leaf,)
        )


def test_huge_clip_equals_no_clip() -> None:
    wide = value_loss(V, RETURNS, MASK, old_values=OLD, clip=1e6).per_token
    torch.testing.assert_close(wide, value_loss(V, RETURNS, MASK).per_token)


def test_masked_tokens_do_not_affect_loss_or_gradient() -> None:
    for junk in (math.nan, math.inf):
        dirty = [x.masked_fill(MASK == 0, junk) for x in (V, RETURNS, OLD)]
        leaf = dirty[0].requires_grad_()
        loss = value_loss(leaf, dirty[1], MASK, old_values=dirty[2], clip=0.2).per_token
        loss.sum().backward()
        assert torch.equal(loss, value_loss(V, RETURNS, MASK, old_values=OLD, clip=0.2).per_token)
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[MASK == 0].any()


def test_value_metrics_give_the_explained_variance() -> None:
    actual = step(value_objective(), samples(), n_mbs=3).metrics
    trained = [s["loss_mask"][:-1] != 0 for s in samples()]
    v, r = (
        torch.cat([s[key][:-1][keep] for s, keep in zip(samples(), trained, strict=True)])
        for key in ("now_values", "returns")
    )
    explained = 1 - actual["value/squared_error"] / (actual["value/squared_return"] - actual["value/return"] ** 2)
    assert explained == pytest.approx((1 - (v - r).square().mean() / r.var(correction=0)).item())
    assert actual["value/value"] == pytest.approx(v.mean().item())


def test_invalid_value_options_and_missing_keys_raise() -> None:
    with pytest.raises(ValueError, match=r"clip = -1.0"):
        value_objective(clip=-1.0)
    with pytest.raises(ValueError, match="needs old_values"):
        value_loss(V, RETURNS, MASK, clip=0.2)
    less = [{k: x for k, x in s.items() if k != "old_values"} for s in samples()]
    with pytest.raises(ValueError, match=r"old_values.*critic"):
        step(value_objective(), less)
    assert step(value_objective(clip=None), less).loss > 0


def test_cross_entropy_is_weighted_by_the_mask() -> None:
    total = weight = plain = 0.0
    count = 0
    for s in samples():
        for t in range(len(s["loss_mask"]) - 1):
            m, nll = s["loss_mask"][t].item(), -s["now_logprobs"][t].item()
            total, weight = total + m * nll, weight + m
            if m:
                plain, count = plain + nll, count + 1
    actual = step(sft_objective(), samples(), n_mbs=2)
    assert actual.loss == pytest.approx(total / weight)
    assert actual.metrics["sft/nll"] == pytest.approx(plain / count)
    assert actual.metrics["sft/tokens"] == count
    assert abs(plain / count - total / weight) > 1e-4


def test_missing_mask_trains_every_target() -> None:
    bare = [{k: x for k, x in s.items() if k != "loss_mask"} for s in samples()]
    targets = torch.cat([s["now_logprobs"][:-1] for s in bare])
    assert step(sft_objective(), bare, n_mbs=3).loss == pytest.approx(-targets.mean().item())


def test_cross_entropy_has_no_gradient_outside_the_mask() -> None:
    leaf = logprobs(1).masked_fill(MASK == 0, math.nan).requires_grad_()
    cross_entropy_loss(leaf, MASK).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, -MASK)
