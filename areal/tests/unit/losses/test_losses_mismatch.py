"""Importance weights between rollout and trainer, and the statistics of their difference, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from areal.tests.unit.losses.losses_world import CU, MASK, batch_of, logprobs, rows
from areal.trainer.losses import (
    MismatchCorrection,
    compare_logprobs,
    importance_weights,
    mismatch_metrics,
)

TRAINER, ROLLOUT = logprobs(1), logprobs(31)
CAP, FLOOR = 1.1, 0.9


def ratios(level: str) -> list[float]:
    out = [1.0] * len(MASK)
    for start, end in rows():
        trained = [t for t in range(start, end) if MASK[t]]
        logs = {t: (TRAINER[t] - ROLLOUT[t]).item() for t in trained}
        for t in trained:
            if level == "token":
                out[t] = math.exp(logs[t])
            elif level == "sequence":
                out[t] = math.exp(sum(logs.values()))
            else:
                out[t] = math.exp(sum(logs.values()) / len(logs))
    return out


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("floor", [0.0, FLOOR])
def test_weights_equal_formula(level: str, mode: str, floor: float) -> None:
    expected, cut = [], []
    for rho, m in zip(ratios(level), MASK.tolist(), strict=True):
        inside = floor <= rho <= CAP
        bounded = min(max(rho, floor), CAP) if mode == "truncate" else rho * inside
        expected.append(bounded if m else 0.0)
        cut.append(bool(m) and not inside)
    actual = importance_weights(TRAINER, ROLLOUT, MASK, CU, level=level, mode=mode, cap=CAP, floor=floor)
    torch.testing.assert_close(actual.weights, torch.tensor(expected, dtype=torch.float64))
    assert actual.truncated.tolist() == cut
    assert 0 < sum(cut) < MASK.sum()
    junk = [x.masked_fill(MASK == 0, math.nan) for x in (TRAINER, ROLLOUT)]
    again = importance_weights(*junk, MASK, CU, level=level, mode=mode, cap=CAP, floor=floor)
    assert torch.equal(again.weights, actual.weights)


def test_weights_have_no_gradient_and_are_finite() -> None:
    leaf = TRAINER.clone().requires_grad_()
    assert not importance_weights(leaf, ROLLOUT, MASK, CU).weights.requires_grad
    far = importance_weights(TRAINER + 1e5, ROLLOUT, MASK, CU, level="sequence", cap=math.inf)
    assert far.weights.isfinite().all()


def test_statistics_equal_formulas() -> None:
    actual = compare_logprobs(TRAINER, ROLLOUT, MASK, CU)
    for t, m in enumerate(MASK.tolist()):
        d = (TRAINER[t] - ROLLOUT[t]).item() * m
        assert actual.k1[t].item() == pytest.approx(-d)
        assert actual.k3[t].item() == pytest.approx(math.exp(d) - 1 - d)
        assert actual.ratio[t].item() == pytest.approx(math.exp(d))
    for i, (start, end) in enumerate(rows()):
        trained = [t for t in range(start, end) if MASK[t]]
        nll = [-sum(x[t].item() for t in trained) / max(len(trained), 1) for x in (TRAINER, ROLLOUT)]
        assert actual.log_perplexity_gap[i].item() == pytest.approx(nll[0] - nll[1])
        assert actual.perplexity_gap[i].item() == pytest.approx(math.exp(nll[0]) - math.exp(nll[1]))


def test_metrics_cover_trained_tokens_only() -> None:
    actual = compare_logprobs(TRAINER, ROLLOUT, MASK, CU)
    metrics = mismatch_metrics(actual, MASK, CU)
    assert metrics["mismatch/k1"].value == pytest.approx(((ROLLOUT - TRAINER) * MASK).sum() / MASK.sum())
    assert metrics["mismatch/ratio_max"].value == (TRAINER - ROLLOUT).exp()[MASK > 0].max()
    assert metrics["mismatch/perplexity_gap"].weight == 4
    assert metrics["mismatch/perplexity_gap"].value == pytest.approx(actual.perplexity_gap.sum() / 4)


def test_equal_logprobs_have_no_mismatch() -> None:
    same = compare_logprobs(TRAINER, TRAINER, MASK, CU)
    assert not same.k1.any()
    assert not same.k3.any()
    assert (same.ratio == 1).all()
    for level in ("token", "sequence", "geometric"):
        assert torch.equal(importance_weights(TRAINER, TRAINER, MASK, CU, level=level).weights, MASK)


def test_correction_reads_selected_logprobs() -> None:
    batch = batch_of(rollout_logprobs=ROLLOUT, old_logprobs=TRAINER)
    now = logprobs(5)
    for trainer, logs in (("old_logprobs", TRAINER), ("logprobs", now)):
        weights, metrics = MismatchCorrection(cap=CAP, trainer=trainer)(now, batch)
        expected = importance_weights(logs, ROLLOUT, MASK, CU, cap=CAP)
        assert torch.equal(weights, expected.weights)
        fraction = expected.truncated.sum() / MASK.sum()
        assert metrics["mismatch/truncated"].value == pytest.approx(fraction)
    with pytest.raises(ValueError, match=r"rollout_logprobs.*sampled"):
        MismatchCorrection()(now, batch_of(old_logprobs=TRAINER))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"level": "word"}, "level = 'word'"),
        ({"mode": "clip"}, "mode = 'clip'"),
        ({"cap": 0.0}, r"cap = 0\.0"),
        ({"cap": math.nan}, "cap = nan"),
        ({"cap": 2.0, "floor": 3.0}, r"floor = 3\.0"),
        ({"trainer": "new"}, "trainer = 'new'"),
    ],
)
def test_invalid_options_raise(options: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        MismatchCorrection(**options)
