"""Losses of pairs, by hand and against loops."""

from __future__ import annotations

import math

import pytest
import torch

from areal.api import Batch, TokenOutputs
from areal.tests.unit.losses.losses_world import logprobs, samples, step, values
from areal.trainer.losses import (
    bradley_terry_loss,
    dpo_loss,
    dpo_objective,
    ipo_loss,
    ipo_objective,
    last_token,
    reward_objective,
)

CHOSEN, REJECTED = values(1, 6), values(2, 6)
SMOOTH = 0.2


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def dpo(h: float) -> float:
    return -(1 - SMOOTH) * log_sigmoid(0.3 * h) - SMOOTH * log_sigmoid(-0.3 * h)


FORMULAS = {
    "dpo": (lambda c, r: dpo_loss(c, r, beta=0.3, label_smoothing=SMOOTH), lambda c, r: dpo(c - r)),
    "ipo": (lambda c, r: ipo_loss(c, r, beta=0.3), lambda c, r: (c - r - 1 / 0.6) ** 2),
    "bradley_terry": (
        lambda c, r: bradley_terry_loss(c, r, center_coef=0.1),
        lambda c, r: -log_sigmoid(c - r) + 0.1 * (c + r) ** 2,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_preference_loss_equals_formula(name: str) -> None:
    fn, formula = FORMULAS[name]
    expected = [formula(c, r) for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)]
    torch.testing.assert_close(fn(CHOSEN, REJECTED), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(fn, (CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()))
    assert fn(CHOSEN.bfloat16(), REJECTED.bfloat16()).dtype == torch.float32
    assert fn(torch.tensor([1e4, -1e4]), torch.tensor([-1e4, 1e4])).isfinite().all()


def log_ratio(sample: dict[str, torch.Tensor]) -> float:
    n = len(sample["loss_mask"]) - 1  # the last position is without a target
    return sum(
        (sample["loss_mask"][t] * (sample["now_logprobs"][t] - sample["ref_logprobs"][t])).item() for t in range(n)
    )


def test_dpo_and_ipo_are_means_over_trained_pairs() -> None:
    """The fourth sequence is untrained: the second pair weighs nothing."""
    batch = samples()
    pairs = [(log_ratio(batch[i]), log_ratio(batch[i + 1])) for i in (0, 4, 6)]
    actual = step(dpo_objective(beta=0.3, label_smoothing=SMOOTH), batch, n_mbs=2, granularity=2)
    assert actual.weight == 3
    assert actual.loss == pytest.approx(sum(dpo(c - r) for c, r in pairs) / 3)
    assert actual.metrics["preference/accuracy"] == pytest.approx(sum(c > r for c, r in pairs) / 3)
    assert actual.metrics["preference/margin"] == pytest.approx(sum(0.3 * (c - r) for c, r in pairs) / 3)
    assert actual.metrics["preference/chosen_reward"] == pytest.approx(sum(0.3 * c for c, _ in pairs) / 3)
    ipo = step(ipo_objective(beta=0.3, average=False), batch, n_mbs=4, granularity=2)
    assert ipo.loss == pytest.approx(sum((c - r - 1 / 0.6) ** 2 for c, r in pairs) / 3)
    # By default the log-ratios are means over a sequence's weights.
    means = [log_ratio(sample) / max(sample["loss_mask"][:-1].sum().item(), 1e-9) for sample in batch]
    average = step(ipo_objective(beta=0.3), batch, n_mbs=4, granularity=2)
    assert average.loss == pytest.approx(sum((means[i] - means[i + 1] - 1 / 0.6) ** 2 for i in (0, 4, 6)) / 3)
    assert average.metrics["preference/margin"] == pytest.approx(
        sum(0.3 * (means[i] - means[i + 1]) for i in (0, 4, 6)) / 3
    )
    assert not actual.gradients["logprobs"][2].any()
    assert not actual.gradients["logprobs"][3].any()


def test_dpo_loss_of_policy_equal_to_reference_is_log_two() -> None:
    batch = [sample | {"ref_logprobs": sample["now_logprobs"]} for sample in samples()]
    actual = step(dpo_objective(beta=0.3), batch)
    assert actual.loss == pytest.approx(math.log(2))
    longest = max(range(0, 8), key=lambda i: len(batch[i]["loss_mask"]) * (i % 2 == 0))
    trained = batch[longest]["loss_mask"][:-1]
    expected = -0.3 / 2 / 3 * trained * (longest != 2)
    torch.testing.assert_close(actual.gradients["logprobs"][longest][:-1], expected)


def test_masked_tokens_do_not_affect_dpo() -> None:
    dirty = []
    for sample in samples():
        outside = sample["loss_mask"] == 0
        keys = ("now_logprobs", "ref_logprobs")
        dirty.append(sample | {key: sample[key].masked_fill(outside, math.nan) for key in keys})
    actual, clean = step(dpo_objective(), dirty), step(dpo_objective(), samples())
    assert actual.loss == clean.loss
    assert actual.metrics == clean.metrics
    torch.testing.assert_close(actual.gradients, clean.gradients, rtol=0, atol=0)


def test_reward_is_value_at_last_token() -> None:
    batch = samples()
    last = [sample["now_values"][-1].item() for sample in batch]
    pairs = list(zip(last[0::2], last[1::2], strict=True))
    actual = step(reward_objective(), batch, n_mbs=2, granularity=2)
    assert actual.weight == 4
    assert actual.loss == pytest.approx(sum(-log_sigmoid(c - r) for c, r in pairs) / 4)
    assert actual.metrics["preference/accuracy"] == pytest.approx(sum(c > r for c, r in pairs) / 4)
    for row in actual.gradients["values"]:
        assert not row[:-1].any()
        assert row[-1] != 0
    assert last_token(torch.arange(6), torch.tensor([0, 2, 5, 6], dtype=torch.int32)).tolist() == [1, 4, 5]


@pytest.mark.parametrize("objective", [dpo_objective(), reward_objective()], ids=["dpo", "reward"])
def test_split_pair_raises_in_weight_and_loss(objective) -> None:
    keys = {"loss_mask": torch.ones(6), "target_ids": torch.ones(6).long()}
    odd = Batch(keys, torch.tensor([0, 2, 4, 6], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"3 sequences.*granularity = 2"):
        objective.weight_fn(odd)
    outputs = TokenOutputs(logprobs=torch.zeros(6), values=torch.zeros(6))
    with_reference = Batch({**odd, "ref_logprobs": torch.zeros(6)}, odd.cu_seqlens)
    with pytest.raises(ValueError, match="granularity = 2"):
        objective.loss_fn(outputs, with_reference)
    cut = torch.tensor([0, 2, 4], dtype=torch.int32)
    for ids, ok in (([5, 5], True), ([0, 1], False)):
        batch = Batch({k: x[:4] for k, x in keys.items()} | {"pair_ids": torch.tensor(ids)}, cut)
        if ok:
            assert objective.weight_fn(batch) == 1
        else:
            with pytest.raises(ValueError, match=r"pair_ids are \[0, 1\].*granularity"):
                objective.weight_fn(batch)


def test_packing_that_splits_pairs_raises() -> None:
    with pytest.raises(ValueError, match="granularity = 2"):
        step(dpo_objective(), samples(), n_mbs=4, granularity=1)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: dpo_objective(beta=0.0), "beta = 0.0"),
        (lambda: ipo_objective(beta=math.inf), "beta = inf"),
        (lambda: dpo_objective(label_smoothing=0.5), "label_smoothing = 0.5"),
        (lambda: reward_objective(center_coef=-1.0), "center_coef = -1.0"),
    ],
)
def test_invalid_options_raise(make, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()


def test_missing_reference_logprobs_raise() -> None:
    cut = torch.tensor([0, 7, 14], dtype=torch.int32)
    batch = Batch({"loss_mask": torch.ones(14), "target_ids": torch.ones(14)}, cut)
    with pytest.raises(ValueError, match=r"ref_logprobs.*reference model"):
        dpo_objective().loss_fn(TokenOutputs(logprobs=logprobs(1)), batch)
