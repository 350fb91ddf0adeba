"""Batches of the groups that are complete: the trainer hardly waits under a long tail, nothing is older than the bound or trained on twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from areal.inference.protocol import Completion, Sampling
from areal.tests.harness.world import record
from areal.tests.unit.rollout.long_tail import TRAINING, Slow, oldest, plan, reward
from areal.tests.unit.rollout.runs import batches, episode, tokens
from areal.tests.unit.rollout.virtual_time import on_loop, train, virtual_runner
from areal.trainer.rollout.exchange import set_runner_state
from areal.trainer.rollout.plan import Group, Plan
from areal.trainer.rollout.report import RolloutReport


def play(made: Plan, steps: int = 40, client: Slow | None = None, items: int = 10_000) -> tuple[float, list[Any]]:
    """Return the fraction of time in which the trainer waits, and the batches."""
    client, played = client or Slow(), []
    with closing(virtual_runner(client, episode(reward), range(items), made)) as runner:
        idle = train(runner, range(steps), TRAINING, lambda step, groups: played.append(groups), client.sync)
    return idle, played


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({"in_order": True}, 0.55, 0.65),
        ({}, 0.0, 0.15),
        ({"partial_answers": True}, 0.0, 0.15),
        ({"max_staleness": 1}, 0.3, 0.6),
        ({"max_staleness": 1, "oversample": 16}, 0.0, 0.25),
    ],
    ids=["in order", "cancelled", "partial", "staleness 1", "staleness 1, oversampled"],
)
def test_trainer_hardly_waits_under_a_long_tail(changes: dict[str, Any], least: float, most: float) -> None:
    """16 groups of 8 answers, and a step that takes two mean answers."""
    made = plan(**changes)
    idle, played = play(made)
    assert least <= idle <= most
    indices = [group.index for batch in played for group in batch]
    assert len(indices) == len(set(indices)) == 40 * 16
    for step, batch in enumerate(played):
        assert [group.index for group in batch] == sorted(group.index for group in batch)
        assert made.partial_answers or min(map(oldest, batch)) >= step - made.max_staleness
    # Groups are consumed, given up, or still there: at most those that may run or wait.
    cancelled = sum(group.cancelled for batch in played for group in batch)
    outstanding = 16 * made.max_staleness + made.oversample
    name = f"staleness {made.max_staleness}, {' '.join(changes) or 'cancelled'}"
    record("Trainer under a long tail", name, waits=f"{idle:.3f}", cancelled=f"{cancelled / max(indices):.3f}")
    assert 0 <= max(indices) + 1 - len(indices) - cancelled <= outstanding
    assert (cancelled > 0) == (not made.in_order and not made.partial_answers)


def test_report_counts_groups_that_were_given_up() -> None:
    _, played = play(plan(), steps=6)
    for step, batch in enumerate(played):
        scalars = RolloutReport(batch, None, step, max_staleness=2).reduce(lambda x: x)
        assert scalars["rollout/groups_cancelled"] == sum(group.cancelled for group in batch)
        assert scalars["rollout/staleness"] <= 2
    assert sum(group.cancelled for batch in played for group in batch)


def test_partial_answers_are_trained_on_without_their_old_tokens() -> None:
    made = plan(partial_answers=True)
    _, played = play(made, steps=12)
    left_out = 0.0
    for step, batch in enumerate(played):
        report = RolloutReport(batch, None, step, max_staleness=2, skip_stale=True)
        for sample in report.samples:
            trained = sample["loss_mask"] > 0
            assert trained.any()
            assert int(sample["versions"][trained].min()) >= step - 2
            assert trained.equal(sample["output_mask"])
        # Other tokens of the same answers are context.
        whole = RolloutReport(batch, None, step)
        both = [
            sorted(map(str, (s["input_ids"].tolist() for s in each)))
            for each in (report.samples + report.untrained, whole.samples)
        ]
        assert both[0] == both[1]
        trained_on = sum(int((s["loss_mask"] > 0).sum()) for s in report.samples)
        scalars = report.reduce(lambda x: x)
        assert scalars["rollout/stale_tokens"] == pytest.approx(1 - trained_on / (16 * 8 * 4))
        assert scalars["rollout/reward"] == 1.0
        left_out += scalars["rollout/stale_tokens"]
    assert left_out > 0
    too_old = [group for step, batch in enumerate(played) for group in batch if oldest(group) < step - 2]
    with pytest.raises(RuntimeError, match=r"Plan\.max_staleness = 2"):
        RolloutReport(too_old[:1], None, 12, max_staleness=2).reduce(lambda x: x)


@pytest.mark.parametrize("partial", [False, True])
def test_without_staleness_batches_are_those_in_order(partial: bool) -> None:
    """To the bit, also with groups that are replaced."""
    kept = {"keep": lambda group: group[0].group % 3 != 0}
    for options in ({}, kept):
        expected = batches(4, Plan(groups=4, group_size=3, seed=7), **options)
        made = Plan(groups=4, group_size=3, seed=7, in_order=False, partial_answers=partial)
        found = batches(4, made, **options)
        assert found == expected


def test_group_beyond_the_bound_is_cancelled_and_replaced() -> None:
    """With the batch after which it is too old. Its requests end then, and not with the run."""
    client, played, cancelled = Slow(endless=5), [], []

    def each(step: int, groups: list[Group]) -> None:
        played.append(groups)
        cancelled.append(client.cancelled.count(5))

    with closing(virtual_runner(client, episode(reward), range(1000), plan(groups=4, group_size=2))) as runner:
        train(runner, range(8), TRAINING, each, client.sync)
    assert cancelled == [0, 0, 0, 2, 2, 2, 2, 2]
    assert played[2][0].cancelled >= 1
    indices = [group.index for batch in played for group in batch]
    assert 5 not in indices
    assert len(indices) == 8 * 4


def test_groups_that_no_batch_could_have_do_not_begin() -> None:
    """At staleness 0, groups in addition begin with their batch, and none begins while it is trained on."""
    client, asked = Slow(), []

    def each(step: int, groups: list[Group]) -> None:
        asked.append(len(client.asked))
        assert {oldest(group) for group in groups} == {step}

    class Counting(Slow):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            self.asked.append((prompt_ids[0], 0))
            return await super().generate(prompt_ids, sampling)

    client = Counting()
    with closing(virtual_runner(client, episode(reward), range(1000), plan(max_staleness=0, oversample=8))) as runner:
        train(runner, range(3), TRAINING, each, client.sync)
    assert asked == [8 * 24, 8 * 48, 8 * 72]


@pytest.mark.parametrize("in_order", [True, False])
def test_state_does_not_wait_for_an_endless_episode(in_order: bool) -> None:
    """A run that goes on from it plays it again, with its seed. Without staleness, all batches are those of a run that went through."""
    made = plan(max_staleness=0, in_order=in_order)
    _, whole = play(made, steps=3)
    client, states = Slow(), []

    async def state_of_a_running_batch() -> float:
        runner.advance(1)
        await asyncio.sleep(3.0)
        states.append(runner.state_dict())
        return float(len(runner._order.running))

    with closing(virtual_runner(client, episode(reward), range(10_000), made)) as runner:
        train(runner, range(1), TRAINING, lambda step, groups: None, client.sync)
        client.endless = whole[1][3].sequences[0].segments[0].tokens[0]
        runner.load_state_dict(runner.state_dict())
        assert on_loop(runner, state_of_a_running_batch()) >= 1
    (state,) = states
    assert 0 < len(state["waiting"]) < 16
    played: list[list[Group]] = []
    again = Slow()
    with closing(virtual_runner(again, episode(reward), range(10_000), made)) as runner:
        runner.load_state_dict(state)
        train(runner, range(1, 3), TRAINING, lambda step, groups: played.append(groups), again.sync)
    assert [tokens(batch) for batch in played] == [tokens(batch) for batch in whole[1:]]
    assert [[oldest(group) for group in batch] for batch in played] == [[1] * 16, [2] * 16]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("partial", [False, True])
def test_run_goes_on_from_its_state(partial: bool, before: int, after: int) -> None:
    """Groups that were consumed or given up are not played again, those that ran are, and the bound holds for those that waited."""
    made = plan(groups=6, group_size=2, partial_answers=partial)
    indices: list[int] = []
    states = []
    for rank in range(before):
        client = Slow()
        with closing(virtual_runner(client, episode(reward), range(10_000), made, rank=rank, size=before)) as runner:
            train(
                runner,
                range(6),
                TRAINING / 4,
                lambda step, groups: indices.extend(group.index for group in groups),
                client.sync,
            )
            states.append(runner.state_dict())
    assert any(state["ahead"] for state in states)
    outstanding = {group["index"] for state in states for group in state["waiting"]}

    def check(step: int, groups: list[Group]) -> None:
        indices.extend(group.index for group in groups)
        assert partial or min(map(oldest, groups)) >= step - 2

    for rank in range(after):
        client = Slow()
        with closing(virtual_runner(client, episode(reward), range(10_000), made, rank=rank, size=after)) as runner:
            set_runner_state(runner, states)
            train(runner, range(6, 12), TRAINING, check, client.sync)
    assert len(indices) == len(set(indices)) == 12 * 6
    assert not partial or outstanding <= set(indices)


def test_options_without_effect_are_refused() -> None:
    for wrong in ({"oversample": 2}, {"partial_answers": True}):
        with pytest.raises(ValueError, match=rf"Plan.{next(iter(wrong))} = .*set in_order to False"):
            Plan(groups=4, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="oversample = -1"):
        Plan(groups=4, in_order=False, oversample=-1)
