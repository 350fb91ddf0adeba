"""Estimators of trainers: which samples are compared with each other, and which numbers of several updates are combined how."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.api import Metric, StepOutput
from areal.inference.protocol import Sampling
from areal.tests.unit.rollout.runs import Client, running
from areal.trainer.advantages import Groups, dr_grpo, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo
from areal.trainer.estimators import (
    GroupRelative,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Sample,
    check_estimator,
    group_tokens,
)
from areal.trainer.monitoring import reduce_metrics, step_metrics, step_scalars
from areal.trainer.rollout.plan import Group, Plan
from areal.trainer.rollout.report import RolloutReport
from areal.trainer.rollout.sequence import Sequence
from areal.utils.data import Segment


def alone(x: torch.Tensor) -> torch.Tensor:
    return x


def sample(reward: float, group: int = 0, tokens: int = 3, **keys: Any) -> Sample:
    mask = torch.ones(tokens)
    mask[0] = 0
    return {"rewards": torch.tensor(reward), "group_ids": torch.tensor(group), "loss_mask": mask} | keys


class Branching:
    """The first episode of a group wins with one sequence; every other one loses with four."""

    def __init__(self) -> None:
        self.played = 0

    async def run(self, client: Any, item: int) -> list[Sequence]:
        self.played += 1
        branches, reward = (1, 1.0) if self.played == 1 else (4, 0.0)
        answers = [await client.generate([item], Sampling()) for _ in range(branches)]
        return [Sequence.single([item], answer, reward) for answer in answers]


def test_branches_of_an_episode_count_once_in_the_baseline() -> None:
    with running(Client(), Branching(), Plan(groups=1, group_size=2)) as runner:
        runner.advance(0)
        groups = runner.next_batch(timeout=20)
        state = Group.of_state(groups[0].state())
    for played in (groups, [state]):
        samples = RolloutReport(played, None, 0).samples
        assert [int(each["episode_ids"]) for each in samples] == [0, 1, 1, 1, 1]
        advantages = [
            each["advantages"].max() + each["advantages"].min() for each in GroupRelative(dr_grpo)(samples, alone)
        ]
        assert advantages == [0.5, -0.5, -0.5, -0.5, -0.5]


def test_samples_without_episodes_are_compared_one_by_one() -> None:
    samples = [sample(1.0), sample(0.0), sample(0.0), sample(0.0), sample(0.0)]
    first, *others = (each["advantages"][1].item() for each in GroupRelative(dr_grpo)(samples, alone))
    assert [first, *others] == pytest.approx([0.8, *[-0.2] * 4])
    with pytest.raises(ValueError, match="1 of 5 samples have the key 'episode_ids'"):
        GroupRelative()([samples[0] | {"episode_ids": torch.tensor(0)}, *samples[1:]], alone)


def sequence(reward: float, tokens: int, *, truncated: bool = False) -> Sequence:
    segments = (Segment([1], trainable=False), Segment([2] * tokens, trainable=True))
    return Sequence(segments, reward, truncated=truncated)


def test_untrained_answers_stay_in_the_baseline_of_their_group() -> None:
    answers = (sequence(1.0, 2), sequence(0.0, 9), sequence(0.5, 3, truncated=True), sequence(0.5, 3))
    group = Group(0, answers)
    report = RolloutReport([group], 5, 0, mask_truncated=True)
    assert [float(each["rewards"]) for each in report.samples] == [1.0, 0.5]
    assert [float(each["rewards"]) for each in report.untrained] == [0.0, 0.5]
    scalars = report.reduce(alone)
    assert scalars["rollout/overlong"] == 1
    assert scalars["rollout/truncated"] == pytest.approx(1 / 3)
    for fn in (grpo, dr_grpo, rloo):
        everything = GroupRelative(fn)(RolloutReport([group], None, 0).samples, alone)
        trained = GroupRelative(fn)([*report.samples, *report.untrained], alone)
        assert len(trained) == 2
        for actual, wanted in zip(trained, (everything[0], everything[3]), strict=True):
            assert torch.equal(actual["advantages"], wanted["advantages"])
    # By default truncated answers are trained on, and a flat group that is skipped needs no baseline.
    assert not RolloutReport([group], None, 0).untrained
    flat = Group(1, (sequence(1.0, 2), sequence(1.0, 9)))
    assert not RolloutReport([flat], 5, 0, skip_flat=True).untrained


def test_distillation_is_the_difference_of_log_probs_at_trained_tokens() -> None:
    keys = {"ref_logprobs": torch.tensor([-9.0, -1.0, -3.0]), "old_logprobs": torch.tensor([-1.0, -1.5, -0.5])}
    (got,) = OnPolicyDistillation()([sample(5.0, **keys)], alone)
    assert got["advantages"].tolist() == [0.0, 0.5, -2.5]
    assert OnPolicyDistillation()([], alone) == []


def test_reinforce_plus_plus_estimators_equal_their_functions() -> None:
    rewards, lengths = [1.0, 0.0, 3.0, 1.0, 2.0], (4, 2, 7, 3, 5)
    samples = [
        sample(reward, group, n, old_logprobs=torch.randn(n), ref_logprobs=torch.randn(n))
        for reward, group, n in zip(rewards, (0, 0, 0, 1, 1), lengths, strict=True)
    ]
    mask = torch.cat([each["loss_mask"] for each in samples])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    outcome = torch.zeros(len(mask))
    outcome[bounds[1:] - 1] = torch.tensor(rewards)
    kl = torch.cat([each["old_logprobs"] - each["ref_logprobs"] for each in samples]) * mask
    wanted = {
        ReinforcePlusPlus(gamma=0.9, kl_coef=0.1): reinforce_plus_plus(outcome - 0.1 * kl, mask, bounds, gamma=0.9),
        ReinforcePlusPlusBaseline(): reinforce_plus_plus_baseline(
            torch.tensor(rewards), Groups.local(torch.tensor([0, 0, 0, 1, 1])), mask, bounds
        ),
    }
    for estimator, expected in wanted.items():
        actual = torch.cat([each["advantages"] for each in estimator(samples, alone)])
        torch.testing.assert_close(actual, expected)
        assert estimator([], alone) == []
    # The baseline counts an answer that is not trained on; the normalisation does not.
    masked = [*samples[:2], samples[2] | {"untrained": torch.tensor(True)}, *samples[3:]]
    actual = torch.cat([each["advantages"] for each in ReinforcePlusPlusBaseline()(masked, alone)])
    kept = torch.cat([torch.full((n - 1,), a) for a, n in zip((-1 / 3, -4 / 3, -0.5, 0.5), (4, 2, 3, 5), strict=True)])
    torch.testing.assert_close(actual[actual != 0], (kept - kept.mean()) / kept.std())


@pytest.mark.parametrize("fn", [grpo, rloo, reinforce_plus_plus])
def test_advantage_function_in_place_of_an_estimator_is_refused(fn: Any) -> None:
    with pytest.raises(ValueError, match=f"estimator = {fn.__name__}: .*GroupRelative\\(function\\)"):
        check_estimator(fn)
    check_estimator(GroupRelative(rloo))


def test_group_tokens_sum_the_mask_of_a_group() -> None:
    samples = [sample(0, 0, 3), sample(0, 7, 5), sample(0, 0, 6)]
    assert [float(each) for each in group_tokens(samples)] == [7.0, 4.0, 7.0]


def test_numbers_of_several_updates_are_combined_as_declared() -> None:
    steps = [
        StepOutput(
            loss=loss,
            terms={"loss": loss},
            metrics={"policy/ratio_max": ratio, "lowest": -ratio, "kl": loss, "weight": 2 * ratio},
            reductions={"policy/ratio_max": "max", "lowest": "min", "kl": "mean", "weight": "sum"},
            n_tokens=tokens,
            n_mbs=2,
            seconds=0.5,
            timings={"forward": 0.25},
            grad_norm=loss,
            lr=0.1,
            update_successful=True,
        )
        for loss, ratio, tokens in ((1.0, 1.1, 100), (3.0, 9.0, 50))
    ]
    combined = reduce_metrics(
        [*(step_metrics("actor", step) for step in steps), {"actor/empty": Metric(1, reduce="sum")}]
    )
    assert combined == pytest.approx(
        {
            "actor/loss": 2.0,
            "actor/policy/ratio_max": 9.0,
            "actor/lowest": -9.0,
            "actor/kl": 2.0,
            "actor/weight": 20.2,
            "actor/n_tokens": 150,
            "actor/n_mbs": 4,
            "actor/seconds": 1.0,
            "actor/seconds/forward": 0.5,
            "actor/grad_norm": 2.0,
            "actor/lr": 0.1,
            "actor/updated": 1.0,
            "actor/empty": 1,
        }
    )
    assert step_scalars("train", steps[0])["train/policy/ratio_max"] == 1.1
