"""Every loss and advantage against the formula of its paper, re-computed by loops in numpy: values to 1e-12, gradients to 1e-8."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal.api import Batch, TokenOutputs
from areal.tests.unit.losses import formulas as f
from areal.trainer.advantages import (
    Groups,
    discounted_returns,
    dr_grpo,
    gae,
    grpo,
    kl_penalized,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from areal.trainer.losses import (
    CISPO,
    GSPO,
    SAPO,
    GroupTokenMean,
    KLTerm,
    MismatchCorrection,
    Objective,
    PolicyGradient,
    PPOClip,
    SequenceMean,
    TokenMean,
    decoupled_ppo_objective,
    distill_objective,
    dpo_objective,
    dr_grpo_objective,
    dro_objective,
    grpo_objective,
    gspo_objective,
    ipo_objective,
    policy_objective,
    ppo_objective,
    reward_objective,
    sft_objective,
    value_objective,
)

D = f.Data()
POLICY = ("logprobs",)
CLIP = f.ppo(0.2, 0.2)
WIDE = (0.15, 0.1)
"""Bounds within which some sequences' ratios lie, and others do not."""


def corrected(level: Any, mode: Any, cap: float, floor: float) -> tuple[Objective, f.Loss]:
    correction = MismatchCorrection(level=level, mode=mode, cap=cap, floor=floor)
    formula = f.token_mean(f.ppo(0.2, 0.2, weights=level, mode=mode, cap=cap, floor=floor))
    return policy_objective(PPOClip(), TokenMean(), correction=correction), formula


def penalized(estimator: Any, weighted: bool, bound: float | None = None) -> tuple[Objective, f.Loss]:
    term = KLTerm(0.3, estimator, importance_weighted=weighted, clamp=bound)
    penalty = f.kl(estimator, 0.3, weighted=weighted, bound=math.inf if bound is None else bound)
    return policy_objective(PPOClip(), TokenMean(), kl=term), f.token_mean(f.plus(CLIP, penalty))


CASES: dict[str, tuple[Objective, f.Loss]] = {
    "ppo": (ppo_objective(), f.token_mean(CLIP)),
    "dual clip": (ppo_objective(dual_clip=3.0), f.token_mean(f.ppo(0.2, 0.2, 3.0))),
    "clip higher": (policy_objective(PPOClip(0.2, 0.28), TokenMean()), f.token_mean(f.ppo(0.2, 0.28))),
    "grpo with k3": (grpo_objective(), f.sequence_mean(f.plus(CLIP, f.kl("k3", 0.04)))),
    "dr grpo": (dr_grpo_objective(max_tokens=20), f.sums_over(20, CLIP)),
    "decoupled": (decoupled_ppo_objective(), f.token_mean(f.ppo(0.2, 0.2, weights="token"))),
    "decoupled, capped": (
        decoupled_ppo_objective(cap=1.3),
        f.token_mean(f.ppo(0.2, 0.2, weights="token", mode="mask", cap=1.3)),
    ),
    "one update, corrected": (
        grpo_objective(kl_coef=0.0, old="logprobs", correction=MismatchCorrection(trainer="logprobs")),
        f.sequence_mean(f.one_update(2.0)),
    ),
    "gspo": (gspo_objective(), f.sequence_mean(f.gspo(3e-4, 4e-4))),
    "gspo, wide": (policy_objective(GSPO(*WIDE), SequenceMean()), f.sequence_mean(f.gspo(*WIDE))),
    "gspo-token": (
        policy_objective(GSPO(*WIDE, per_token=True), SequenceMean()),
        f.sequence_mean(f.gspo_token(*WIDE)),
    ),
    "cispo": (policy_objective(CISPO(0.4, 0.5), TokenMean()), f.token_mean(f.cispo(0.4, 0.5))),
    "dro": (dro_objective(beta=0.3), f.dro(0.3)),
    "sapo": (policy_objective(SAPO(1.0, 1.05), SequenceMean()), f.sequence_mean(f.sapo(1.0, 1.05))),
    "group token mean": (policy_objective(PPOClip(), GroupTokenMean()), f.group_token_mean(CLIP)),
    "entropy": (
        policy_objective(PolicyGradient(), TokenMean(), entropy_coef=0.2),
        f.token_mean(f.plus(f.policy_gradient, f.entropy_bonus(0.2))),
    ),
    **{
        f"correction {level} {mode} {cap}": corrected(level, mode, cap, floor)
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "mask")
        for cap, floor in ((2.0, 0.0), (1.2, 0.8))
    },
    **{
        f"{estimator}{' weighted' if weighted else ''}": penalized(estimator, weighted)
        for estimator in ("k1", "k2", "k3")
        for weighted in (False, True)
    },
    "k3 clamped": penalized("k3", False, 0.4),
    "value clip": (value_objective(clip=0.3), f.token_mean(f.value(0.3))),
    "dpo": (dpo_objective(beta=0.3, label_smoothing=0.2), f.dpo(0.3, 0.2)),
    "ipo": (ipo_objective(beta=0.3), f.ipo(0.3, average=True)),
    "ipo of sums": (ipo_objective(beta=0.3, average=False), f.ipo(0.3, average=False)),
    "bradley-terry": (reward_objective(center_coef=0.1), f.bradley_terry(0.1)),
    "forward kl": (distill_objective(direction="forward"), f.token_mean(f.distill(forward=True))),
    "reverse kl": (distill_objective(direction="reverse"), f.token_mean(f.distill(forward=False))),
    "sft": (sft_objective(), f.cross_entropy),
}

DISTILLED = ("forward kl", "reverse kl")
WEIGHTED = ("dpo", "ipo", "ipo of sums", "sft")
"""Losses whose mask has weights other than 0 and 1."""


def as_batch(name: str) -> Batch:
    """Return the data as a loss function receives it; what is masked is NaN."""
    trained = torch.from_numpy(D.mask) != 0

    def masked(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).masked_fill(~trained, torch.nan)

    cuts = torch.tensor(f.CUTS, dtype=torch.int32)
    mask = torch.from_numpy(D.weights if name in WEIGHTED else D.mask)
    sums = [
        sum(D.mask[a:b].sum() for a, b, g in zip(f.CUTS, f.CUTS[1:], f.GROUP, strict=False) if g == own)
        for own in f.GROUP
    ]
    keys = {
        "loss_mask": mask,
        "target_ids": torch.ones(len(mask), dtype=torch.int64),
        "group_tokens": torch.tensor(sums, dtype=torch.float64),
        **{key: masked(getattr(D, key)) for key in ("advantages", "old_values", "returns")},
        **{f"{key}_logprobs": masked(getattr(D, key)) for key in ("old", "rollout", "ref")},
    }
    if name in DISTILLED:
        keys |= {
            "target_ids": torch.arange(D.k).expand(len(mask), D.k),
            "teacher_logprobs": torch.from_numpy(D.teacher),
        }
    return Batch(keys, cuts)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_formula(name: str) -> None:
    objective, formula = CASES[name]
    x = {output: D.student if name in DISTILLED else D.inputs()[str(output)] for output in objective.outputs}
    leaves = {key: torch.from_numpy(values).clone().requires_grad_() for key, values in x.items()}
    batch = as_batch(name)
    returned: Any = objective.loss_fn(TokenOutputs(**leaves), batch)
    weight: Any = objective.weight_fn(batch)
    loss = returned[0] / weight
    assert loss.item() == pytest.approx(formula(x, x, D), rel=1e-12)
    loss.backward()
    for key, expected in f.gradients(formula, x, D).items():
        assert np.abs(expected).max() > 1e-3, "the gradient is not tested by zeros"
        actual: Any = leaves[key].grad
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max(), err_msg=key)


def test_data_reach_every_branch_and_no_kink() -> None:
    """Central differences need a distance to the bounds, and a bound that no token crosses is not tested."""
    trained = D.trained()
    ratios = np.exp(D.new - D.old)[trained]
    signs = D.advantages[trained] > 0
    for bound in (0.8, 1.2, 1.28, 3.0, 0.6, 1.5):
        assert np.abs(ratios - bound).min() > 1e-3
    for sign in (True, False):
        assert (ratios[signs == sign] < 0.8).any()
        assert (ratios[signs == sign] > 1.28).any()
    assert (ratios[~signs] > 3).any()
    sequences = np.array([math.exp(f.mean(D.new[t] - D.old[t] for t in ids)) for ids in D.sequences()])
    for bound in (1 - WIDE[0], 1 + WIDE[1], 1 - 3e-4, 1 + 4e-4):
        assert np.abs(sequences - bound).min() > 1e-4
    assert ((sequences > 1 - WIDE[0]) & (sequences < 1 + WIDE[1])).any()
    for level in ("token", "sequence", "geometric"):
        weights = f.importance(D, D.old, level)[trained]
        assert (weights > 2).any() or level == "geometric"
        assert (weights < 0.8).any()
        assert (weights > 1.2).any()
        assert ((weights > 0.8) & (weights < 1.2)).any()
    assert {int(D.mask[a:b].sum()) for a, b in pairwise(f.CUTS)} >= {0, 1}
    k3 = np.array(f.kl("k3", 1.0)({"logprobs": D.new}, {}, D))[trained]
    assert (k3 > 0.4).any() > (k3 > 0.4).all()


# ---- advantages


ACTIONS = torch.from_numpy(D.mask)
CU = torch.tensor(f.CUTS)
GROUPS = Groups.local(torch.tensor(f.GROUP))
REWARDS = torch.from_numpy(D.rewards)
SPARSE = torch.from_numpy(D.advantages * D.mask)
"""A reward at every action."""


def in_group(formula: Callable[[float, list[float], list[float]], float]) -> list[float]:
    """Apply a formula of a reward, those of its group, and those of the others in it, to each sequence."""
    out = []
    for i, own in enumerate(D.rewards):
        members = [j for j in range(len(f.GROUP)) if f.GROUP[j] == f.GROUP[i]]
        out.append(formula(own, [D.rewards[j] for j in members], [D.rewards[j] for j in members if j != i]))
    return out


def by_actions(formula: Callable[[list[int], int], float]) -> list[float]:
    """Apply a formula of a sequence's actions, and the number of one of them, to each action; 0 elsewhere."""
    out = [0.0] * f.CUTS[-1]
    for ids in D.sequences():
        for k, t in enumerate(ids):
            out[t] = formula(ids, k)
    return out


def gae_advantage(ids: list[int], k: int, gamma: float = 0.9, lam: float = 0.8) -> float:
    total = 0.0
    for i in range(k, len(ids)):
        following = D.old_values[ids[i + 1]] if i + 1 < len(ids) else 0.0
        delta = SPARSE[ids[i]].item() + gamma * following - D.old_values[ids[i]]
        total += (gamma * lam) ** (i - k) * delta
    return total


def returns(ids: list[int], k: int, gamma: float = 0.9) -> float:
    return sum(gamma ** (i - k) * SPARSE[ids[i]].item() for i in range(k, len(ids)))


def penalized_returns(ids: list[int], k: int) -> float:
    return sum(SPARSE[t].item() - 0.1 * (D.old[t] - D.ref[t]) for t in ids[k:])


def whitened(numbers: list[float]) -> list[float]:
    trained = [numbers[t] for t in D.trained()]
    center, scale = f.mean(trained), f.deviation(trained) + 1e-8
    return [(numbers[t] - center) / scale if D.mask[t] else 0.0 for t in range(f.CUTS[-1])]


def centered(t: int) -> float:
    sequence = next(i for i in range(len(f.GROUP)) if f.CUTS[i] <= t < f.CUTS[i + 1])
    return in_group(lambda own, group, others: own - f.mean(group))[sequence]


def soft_overlong(length: int) -> float:
    """Equation 13 of DAPO, with a maximum of 20 tokens and a cache of 6."""
    return 0.0 if length <= 14 else -1.0 if length > 20 else (14 - length) / 6


LENGTHS = (3, 14, 15, 18, 20, 21, 40)
KL = torch.from_numpy((D.old - D.ref) * D.mask)
OLD_VALUES = torch.from_numpy(D.old_values)
ADVANTAGES: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "grpo": (
        lambda: grpo(REWARDS, GROUPS),
        in_group(lambda own, group, others: (own - f.mean(group)) / (f.deviation(group) + 1e-6)),
    ),
    "dr grpo": (lambda: dr_grpo(REWARDS, GROUPS), in_group(lambda own, group, others: own - f.mean(group))),
    "rloo": (lambda: rloo(REWARDS, GROUPS), in_group(lambda own, group, others: own - f.mean(others))),
    "gae": (lambda: gae(SPARSE, OLD_VALUES, ACTIONS, CU, gamma=0.9, lam=0.8).advantages, by_actions(gae_advantage)),
    "gae returns": (
        lambda: gae(SPARSE, OLD_VALUES, ACTIONS, CU, gamma=0.9, lam=0.8).returns,
        by_actions(lambda ids, k: gae_advantage(ids, k) + D.old_values[ids[k]]),
    ),
    "returns": (lambda: discounted_returns(SPARSE, ACTIONS, CU, gamma=0.9), by_actions(returns)),
    "reinforce++": (
        lambda: reinforce_plus_plus(kl_penalized(SPARSE, KL, ACTIONS, coef=0.1), ACTIONS, CU),
        whitened(by_actions(penalized_returns)),
    ),
    "reinforce++ baseline": (
        lambda: reinforce_plus_plus_baseline(REWARDS, GROUPS, ACTIONS, CU),
        whitened(by_actions(lambda ids, k: centered(ids[k]))),
    ),
    "overlong": (
        lambda: overlong_penalty(torch.tensor(LENGTHS).double(), max_length=20, cache_length=6),
        [soft_overlong(n) for n in LENGTHS],
    ),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_equals_formula(name: str) -> None:
    compute, expected = ADVANTAGES[name]
    np.testing.assert_allclose(compute().numpy(), expected, rtol=1e-12, atol=1e-12)
