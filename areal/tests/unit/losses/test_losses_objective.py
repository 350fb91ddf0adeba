"""Objectives: the same loss, gradient and metrics however a batch is cut, whole formulas as loops, and what they say of a wrong batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs, arguments, default_loss_weight
from areal.engine.loss_call import resolve_loss
from areal.tests.unit.losses.losses_world import Step, batch_of, logprobs, samples, step
from areal.trainer.losses import (
    CISPO,
    DRO,
    GSPO,
    SAPO,
    FixedLength,
    GroupTokenMean,
    ImportanceSampling,
    KLTerm,
    MismatchCorrection,
    Objective,
    PolicyGradient,
    PPOClip,
    SequenceMean,
    SequenceMeanOfSums,
    TokenMean,
    cispo_objective,
    dapo_objective,
    decoupled_ppo_objective,
    distill_objective,
    dpo_objective,
    dr_grpo_objective,
    dro_objective,
    grpo_objective,
    gspo_objective,
    ipo_objective,
    mean_loss,
    policy_objective,
    ppo_objective,
    reward_objective,
    sapo_objective,
    sft_objective,
    value_objective,
)

AGGREGATIONS = [TokenMean(), SequenceMean(), SequenceMeanOfSums(), FixedLength(11), GroupTokenMean()]
SURROGATES = [
    PolicyGradient(),
    ImportanceSampling(),
    PPOClip(0.1, 0.15, 1.3),
    GSPO(0.05, 0.1),
    GSPO(0.05, 0.1, per_token=True),
    CISPO(0.1, 0.2),
    DRO(),
    DRO(sequence=True, old="ref_logprobs"),
    SAPO(),
]
MORE = {"kl": KLTerm(0.1, importance_weighted=True), "entropy_coef": 0.01}
ALIKE: dict[str, Objective] = {}
"""Objectives whose result does not depend on the cut into micro-batches."""
for _surrogate in SURROGATES:
    for _aggregation in AGGREGATIONS:
        ALIKE[f"{_surrogate}/{type(_aggregation).__name__}"] = policy_objective(_surrogate, _aggregation, **MORE)
for _aggregation in AGGREGATIONS:
    ALIKE[f"sft/{type(_aggregation).__name__}"] = sft_objective(_aggregation)
    ALIKE[f"value/{type(_aggregation).__name__}"] = value_objective(_aggregation)
for _level in ("token", "sequence", "geometric"):
    _correction = MismatchCorrection(level=_level, cap=1.1, mode="mask")
    ALIKE[f"corrected/{_level}"] = policy_objective(PPOClip(), correction=_correction)
PAIRS = {
    "dpo": dpo_objective(label_smoothing=0.1),
    "ipo": ipo_objective(),
    "reward": reward_objective(center_coef=0.01),
}
TOP = {
    f"{direction}/{type(aggregation).__name__}": distill_objective(aggregation, direction=direction)
    for direction in ("forward", "reverse")
    for aggregation in AGGREGATIONS
}


def assert_same(a: Step, b: Step) -> None:
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.weight == pytest.approx(b.weight, rel=1e-6)
    assert a.metrics == pytest.approx(b.metrics, rel=1e-12)
    assert len(a.metrics) > 1
    for name, rows in a.gradients.items():
        # Up to the float32 in which weights are counted.
        torch.testing.assert_close(rows, b.gradients[name], rtol=1e-6, atol=1e-12)
        assert any(row.any() for row in rows)


@pytest.mark.parametrize("name", ALIKE)
def test_loss_does_not_depend_on_micro_batches(name: str) -> None:
    full = step(ALIKE[name], samples())
    for n_mbs in (2, 3, 8):
        assert_same(step(ALIKE[name], samples(), n_mbs=n_mbs), full)


@pytest.mark.parametrize("name", PAIRS)
def test_pair_loss_does_not_depend_on_micro_batches(name: str) -> None:
    full = step(PAIRS[name], samples())
    for n_mbs in (2, 4):
        assert_same(step(PAIRS[name], samples(), n_mbs=n_mbs, granularity=2), full)


@pytest.mark.parametrize("name", TOP)
def test_distill_loss_does_not_depend_on_micro_batches(name: str) -> None:
    full = step(TOP[name], samples(k=3))
    assert_same(step(TOP[name], samples(k=3), n_mbs=3), full)


PER_TOKEN = ("advantages", "returns", "old_values", "old_logprobs", "rollout_logprobs", "ref_logprobs", "now_logprobs")


def dirty(batch: list[dict[str, torch.Tensor]], junk: float) -> list[dict[str, torch.Tensor]]:
    """Junk in every per-token key outside the mask, and at the last position, which is without a target."""
    made = []
    for sample in batch:
        outside = (sample["loss_mask"] == 0).clone()
        outside[-1] = True
        keys = (*PER_TOKEN, "now_entropy", "now_values")
        made.append(sample | {key: sample[key].masked_fill(outside, junk) for key in keys})
    return made


@pytest.mark.parametrize("name", [name for name in ALIKE if "TokenMean" in name or "corrected" in name])
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_masked_tokens_do_not_affect_loss_or_gradient(name: str, junk: float) -> None:
    clean, soiled = step(ALIKE[name], samples()), step(ALIKE[name], dirty(samples(), junk), n_mbs=2)
    assert_same(soiled, clean)
    for rows in soiled.gradients.values():
        for row, sample in zip(rows, samples(), strict=True):
            assert not row[sample["loss_mask"] == 0].any()


def token_terms(sample: dict[str, torch.Tensor], low: float, high: float, kl: float) -> list[float]:
    """PPO's clip plus k3 at each position, weighted by the mask; the last position is without a target."""
    out = []
    for t in range(len(sample["loss_mask"]) - 1):
        new, old, ref = (sample[key][t].item() for key in ("now_logprobs", "old_logprobs", "ref_logprobs"))
        r, a = math.exp(new - old), sample["advantages"][t].item()
        loss = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
        loss += kl * (math.exp(ref - new) - 1 - (ref - new))
        out.append(sample["loss_mask"][t].item() * loss)
    return out


def test_recipes_equal_formulas_of_papers() -> None:
    batch = samples()
    masks = [s["loss_mask"][:-1].sum().item() for s in batch]
    trained = [i for i, m in enumerate(masks) if m]
    grpo = [token_terms(s, 0.2, 0.2, 0.04) for s in batch]
    plain = [token_terms(s, 0.2, 0.2, 0.0) for s in batch]
    higher = [token_terms(s, 0.2, 0.28, 0.0) for s in batch]
    expected = {
        "grpo": sum(sum(grpo[i]) / masks[i] for i in trained) / len(trained),
        "dr_grpo": sum(map(sum, plain)) / 9 / len(trained),
        "dapo": sum(map(sum, higher)) / sum(masks),
        "ppo": sum(map(sum, plain)) / sum(masks),
    }
    actual = {
        "grpo": grpo_objective(),
        "dr_grpo": dr_grpo_objective(max_tokens=9),
        "dapo": dapo_objective(),
        "ppo": ppo_objective(),
    }
    for name, objective in actual.items():
        assert step(objective, batch, n_mbs=3).loss == pytest.approx(expected[name], rel=1e-6), name
    assert len({round(value, 6) for value in expected.values()}) == 4


def test_decoupled_ppo_equals_clip_times_capped_weight() -> None:
    batch, total, weight = samples(), 0.0, 0.0
    for s in batch:
        for t, loss in enumerate(token_terms(s, 0.2, 0.2, 0.0)):
            rho = math.exp((s["old_logprobs"][t] - s["rollout_logprobs"][t]).item())
            total += loss * (rho if rho <= 1.1 else 0.0)
            weight += s["loss_mask"][t].item()
    actual = step(decoupled_ppo_objective(cap=1.1), batch, n_mbs=2)
    assert actual.loss == pytest.approx(total / weight, rel=1e-6)
    assert 0 < actual.metrics["mismatch/truncated"] < 1


def test_recipes_equal_explicit_policy_objectives() -> None:
    pairs = [
        (gspo_objective(), policy_objective(GSPO(3e-4, 4e-4), SequenceMean())),
        (cispo_objective(), policy_objective(CISPO(math.inf, 4.0), TokenMean())),
        (sapo_objective(), policy_objective(SAPO(1.0, 1.05), SequenceMean())),
        (
            dro_objective(beta=0.2),
            policy_objective(DRO(0.2, sequence=True, old="ref_logprobs"), SequenceMeanOfSums()),
        ),
    ]
    for recipe, explicit in pairs:
        assert_same(step(recipe, samples()), step(explicit, samples()))


def test_entropy_bonus_and_metric() -> None:
    bare = step(ppo_objective(), samples())
    seen = step(ppo_objective(report_entropy=True), samples())
    paid = step(ppo_objective(entropy_coef=0.5), samples())
    assert seen.loss == pytest.approx(bare.loss)
    assert "policy/entropy" not in bare.metrics
    entropies = [(s["now_entropy"][:-1] * s["loss_mask"][:-1]).sum() for s in samples()]
    assert paid.loss == pytest.approx(bare.loss - 0.5 * (sum(entropies) / bare.weight).item(), rel=1e-6)
    trained = torch.cat([s["now_entropy"][:-1][s["loss_mask"][:-1] != 0] for s in samples()])
    assert seen.metrics["policy/entropy"] == pytest.approx(trained.mean().item())


@pytest.mark.parametrize(
    ("objective", "key", "source"),
    [
        (ppo_objective(), "old_logprobs", "before the update"),
        (policy_objective(ImportanceSampling()), "rollout_logprobs", "sampled"),
        (grpo_objective(), "ref_logprobs", "reference"),
        (ppo_objective(), "advantages", "one for each token"),
        (ppo_objective(), "loss_mask", "builders"),
        (policy_objective(PPOClip(), correction=MismatchCorrection()), "rollout_logprobs", "sampled"),
    ],
)
def test_missing_key_raises_with_its_source(objective: Objective, key: str, source: str) -> None:
    keys = {name: logprobs(2) for name in PER_TOKEN}
    batch = batch_of(**keys)
    less = Batch({name: batch[name] for name in batch if name not in (key, "cu_seqlens", "meta")}, batch.cu_seqlens)
    objective.loss_fn(TokenOutputs(logprobs=logprobs(1)), batch)
    with pytest.raises(ValueError, match=f"no key '{key}'.*{source}"):
        objective.loss_fn(TokenOutputs(logprobs=logprobs(1)), less)


def test_wrong_shape_or_missing_output_raises() -> None:
    batch = batch_of(old_logprobs=logprobs(1)[1:], advantages=logprobs(2))
    with pytest.raises(ValueError, match=r"old_logprobs.*\(13,\).*\(14,\)"):
        ppo_objective().loss_fn(TokenOutputs(logprobs=logprobs(1)), batch)
    with pytest.raises(ValueError, match=r"output 'logprobs'.*objective.outputs"):
        ppo_objective().loss_fn(TokenOutputs(), batch)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: PPOClip(clip_low=-0.1), r"PPOClip.clip_low = -0.1"),
        (lambda: PPOClip(clip_high=math.nan), r"PPOClip.clip_high = nan"),
        (lambda: PPOClip(dual_clip=1.0), r"PPOClip.dual_clip = 1.0"),
        (lambda: PPOClip(old="ref_logprobs"), r"PPOClip.old = 'ref_logprobs'"),
        (lambda: SAPO(tau_neg=0.0), r"SAPO.tau_neg = 0.0"),
        (lambda: DRO(beta=-1.0), r"DRO.beta = -1.0"),
        (lambda: GSPO(clip_low=-1.0), r"GSPO.clip_low = -1.0"),
        (lambda: CISPO(clip_high=-1.0), r"CISPO.clip_high = -1.0"),
        (lambda: dr_grpo_objective(max_tokens=0), r"FixedLength.length = 0"),
        (lambda: grpo_objective(kl_coef=-1.0), r"KLTerm.coef = -1.0"),
        (lambda: ppo_objective(entropy_coef=math.inf), r"entropy_coef = inf"),
        (
            lambda: policy_objective(ImportanceSampling(), correction=MismatchCorrection()),
            r"ImportanceSampling.old = 'rollout_logprobs'",
        ),
    ],
)
def test_invalid_options_raise_at_creation(make, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()


def token_average(outputs: TokenOutputs, batch: Batch) -> tuple[torch.Tensor, dict[str, Metric]]:
    mask = batch["loss_mask"]
    if not mask.any():
        raise AssertionError("a micro-batch without weight was passed to the loss")
    mean = -(outputs.logprobs * mask).sum() / mask.sum()
    return mean, {"mean": Metric(mean, weight=mask.sum()), "tokens": Metric(mask.sum(), reduce="sum")}


def test_mean_loss_skips_untrained_micro_batches() -> None:
    """One of eight micro-batches is untrained."""
    full = step(mean_loss(token_average), samples())
    assert_same(step(mean_loss(token_average), samples(), n_mbs=8), full)
    assert full.loss == pytest.approx(step(sft_objective(), samples()).loss, rel=1e-6)


def test_mean_loss_weights_each_term_separately() -> None:
    def terms(outputs: TokenOutputs, batch: Batch) -> dict[str, torch.Tensor]:
        mask = batch["loss_mask"]
        return {"a": (outputs.logprobs * mask).sum() / mask.sum(), "b": outputs.logprobs.mean()}

    def weights(batch: Batch) -> dict[str, torch.Tensor]:
        return {"a": batch["loss_mask"].sum(), "b": torch.tensor(float(len(batch["loss_mask"])))}

    objective = mean_loss(terms, weights)
    full, cut = step(objective, samples()), step(objective, samples(), n_mbs=8)
    assert cut.loss == pytest.approx(full.loss, rel=1e-6)
    torch.testing.assert_close(cut.gradients, full.gradients)
    with pytest.raises(ValueError, match=r"returned \['a', 'b'\] and its weight a scalar"):
        mean_loss(terms, default_loss_weight).loss_fn(TokenOutputs(logprobs=logprobs(1)), batch_of())


class Bound:
    """A loss as a bound method, which takes no attributes."""

    def loss(self, outputs: TokenOutputs, batch: Batch) -> torch.Tensor:
        return outputs.logprobs.sum()

    def weight(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(float(len(batch.cu_seqlens) - 1))


def test_loss_function_alone_is_refused_if_its_weight_is_not_the_default() -> None:
    own = Bound()
    for objective in (grpo_objective(kl_coef=0.0), Objective(own.loss, own.weight)):
        with pytest.raises(ValueError, match="loss_weight_fn is missing"):
            resolve_loss(objective.loss_fn, None, None)
        assert resolve_loss(objective, None, None) == (objective.loss_fn, objective.weight_fn, objective.outputs)
        assert resolve_loss(objective.loss_fn, objective.weight_fn, None)[1] == objective.weight_fn
        assert resolve_loss(objective.loss_fn, None, None, "sum")[1] is default_loss_weight
    # The default weight is what a verb takes for a loss function alone.
    plain = Objective(own.loss)
    assert resolve_loss(plain.loss_fn, None, None) == (plain.loss_fn, default_loss_weight, ("logprobs",))
    # More outputs than the objective reads are allowed.
    assert resolve_loss(plain, None, ("logprobs", "entropy"))[2] == ("logprobs", "entropy")


@pytest.mark.parametrize(
    ("weight", "by_group"),
    [
        (lambda batch: arguments.default_loss_weight(batch), False),
        (TokenMean().weight, False),
        (GroupTokenMean().weight, True),
    ],
    ids=["default", "tokens", "groups"],
)
def test_weights_are_exact(weight: Callable[[Batch], Tensor], by_group: bool) -> None:
    """They divide the loss: rounding would depend on how the batch was cut."""
    mask = torch.rand(30_000, generator=torch.Generator().manual_seed(0))
    cut = (0, 7_000, 7_001, 30_000)
    group_tokens = torch.tensor([11_003.0, 3.0, 17_011.0])
    inverse = torch.ones(30_000, dtype=torch.float64)
    if by_group:
        inverse = (1 / group_tokens.double()).repeat_interleave(torch.tensor(cut).diff())
    expected = math.fsum((mask.double() * inverse).tolist())
    parts = []
    for begin, end in ((0, 3), (0, 1), (1, 3)):
        rows = slice(cut[begin], cut[end])
        values = {"loss_mask": mask[rows], "group_tokens": group_tokens[begin:end]}
        parts.append(float(weight(Batch(values, torch.tensor(cut[begin : end + 1]) - cut[begin]))))
    assert parts[0] == pytest.approx(expected, rel=1e-14)
    assert parts[1] + parts[2] == pytest.approx(expected, rel=1e-14)
