"""Episodes that are played ahead of a trainer: how far ahead, in which order, with which seeds, and what becomes of failures."""

import asyncio
import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.inference.protocol import Completion
from areal.tests.harness.limits import wait_until
from areal.tests.unit.rollout.runs import ITEMS, Client, batches, episode, running, tokens
from areal.trainer.mismatch import mismatch
from areal.trainer.rollout.exchange import set_runner_state
from areal.trainer.rollout.plan import Group, Plan
from areal.trainer.rollout.report import RolloutReport
from areal.trainer.rollout.runner import Runner
from areal.trainer.rollout.sequence import Sequence
from areal.utils.data import Segment


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness_is_bounded(staleness: int) -> None:
    """Groups that take any time at all start no earlier than the bound, and as early as it lets them."""
    rng, started = random.Random(0), {}
    plan = Plan(groups=4, group_size=2, max_staleness=staleness, shuffle=False)

    class Noting:
        async def run(self, client: Any, item: int) -> list[Sequence]:
            started.setdefault(item, trained)
            return await episode().run(client, item)

    trained = 0
    runner = Runner(Client(lambda: rng.random() * 0.03), Noting(), range(1000), plan)
    ages = []
    for step in range(12):
        trained = step
        runner.advance(step)
        groups = runner.next_batch(timeout=20)
        assert [group.index for group in groups] == list(range(4 * step, 4 * step + 4))
        ages += [step - started[group.index] for group in groups]
        time.sleep(0.02)
    runner.close()
    assert max(ages) == staleness


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_groups_do_not_depend_on_number_of_ranks(size: int) -> None:
    plan = Plan(groups=4, group_size=3, seed=7)
    per_rank = [batches(6, plan, rank=rank, size=size) for rank in range(size)]
    together = [sorted(group for steps in per_rank for group in steps[step]) for step in range(6)]
    assert together == batches(6, plan)
    assert len({seed for step in together for _, group in step for _, seed in group}) == 6 * 4 * 3


def test_items_come_once_per_epoch_in_new_order() -> None:
    played = [group[0][0] for step in batches(6, Plan(groups=5)) for _, group in step]
    epochs = [played[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == ITEMS for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    in_order = [group[0][0] for step in batches(2, Plan(groups=5, shuffle=False)) for _, group in step]
    assert in_order == ITEMS


def test_failed_and_timed_out_episodes_are_counted() -> None:
    def reward(item: int, answer: Completion) -> Any:
        if item == 3:
            raise KeyError("no such answer")
        return asyncio.sleep(60, 1.0) if item == 5 else 0.5

    async def of(item: int, answer: Completion) -> float:
        worth = reward(item, answer)
        return worth if isinstance(worth, float) else await worth

    plan = Plan(groups=10, group_size=2, episode_seconds=0.5, shuffle=False)
    with running(Client(), episode(of), plan) as runner:
        runner.advance(0)
        groups = runner.next_batch(timeout=20)
    assert [group.failed for group in groups] == [0, 0, 0, 2, 0, 2, 0, 0, 0, 0]
    assert groups[3].error == "KeyError: 'no such answer'"
    assert groups[5].error == "TimeoutError: the episode took longer than Plan.episode_seconds = 0.5"
    assert [len(group.sequences) for group in groups] == [2, 2, 2, 0, 2, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("staleness", [0, 2])
def test_filtered_groups_are_replaced(staleness: int) -> None:
    plan = Plan(groups=2, max_staleness=staleness, shuffle=False)
    with running(Client(), episode(), plan, keep=lambda group: group[0].group % 3 != 0) as runner:
        actual = []
        for step in range(4):
            runner.advance(step)
            actual.append([group.index for group in runner.next_batch(timeout=20)])
    assert actual == [[1, 2], [4, 5], [7, 8], [10, 11]]


@pytest.mark.parametrize("rank", [0, 1])
def test_kept_groups_have_the_positions_of_a_full_batch(rank: int) -> None:
    """However many were rejected between them, so that mini-batches are of equal size."""
    plan = Plan(groups=4, shuffle=False)
    with running(Client(), episode(), plan, keep=lambda g: g[0].group in (1, 9, 16, 22), rank=rank, size=2) as runner:
        runner.advance(0)
        groups = runner.next_batch(timeout=20)
    assert [group.index for group in groups] == ([16, 22] if rank == 0 else [1, 9])
    assert [group.position for group in groups] == [rank, rank + 2]


def test_keep_that_rejects_too_many_groups_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Instead of playing for ever. The log tells of rejected groups before."""
    client, plan = Client(), Plan(groups=2, group_size=2, max_rejected=5, max_concurrent=4)
    with running(client, episode(), plan, keep=lambda group: False) as runner:
        runner.advance(0)
        with pytest.raises((RuntimeError, TimeoutError)) as raised:
            runner.next_batch(timeout=5)
        assert "keep= rejected 11 groups, more than Plan.max_rejected = 5" in str(raised.value)
        # Groups that were running end, and no group starts after the error.
        time.sleep(0.1)
        assert len(client.asked) <= 2 * (11 + 2)
    assert [record.getMessage() for record in caplog.records] == ["rank 0: 1 groups rejected by keep= so far"]
    with pytest.raises(ValueError, match=r"Plan\.max_rejected = 0"):
        Plan(groups=1, max_rejected=0)


def test_rejected_groups_are_counted_with_their_reward() -> None:
    """Also after a checkpoint, in which they wait."""
    plan = Plan(groups=2, max_staleness=1, shuffle=False)
    rewarded = episode(lambda item, answer: float(item))
    with running(Client(), rewarded, plan, keep=lambda group: group[0].group % 3 == 2) as runner:
        runner.advance(0)
        first = runner.next_batch(timeout=20)
        wait_until(lambda: len(runner.state_dict()["waiting"]) >= 6, "further groups wait")
        state = runner.state_dict()
    with running(Client(), rewarded, plan, keep=lambda group: True) as runner:
        runner.load_state_dict(state)
        second = runner.next_batch(timeout=20)
    assert [(group.index, group.rejected) for group in first] == [(2, (0.0, 1.0)), (5, (3.0, 4.0))]
    assert [(group.index, group.rejected) for group in second] == [(8, (6.0, 7.0)), (11, (9.0, 0.0))]
    scalars = RolloutReport([Group.of_state(group.state()) for group in first], None, 0).reduce(lambda x: x)
    assert scalars["rollout/groups_rejected"] == 4
    assert scalars["rollout/rejected_reward"] == 2.0
    assert scalars["rollout/reward"] == 3.5
    none = RolloutReport([replace(group, rejected=()) for group in first], None, 0).reduce(lambda x: x)
    assert none["rollout/groups_rejected"] == 0
    assert "rollout/rejected_reward" not in none


def test_failed_episodes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def reward(item: int, answer: Completion) -> float:
        raise KeyError("no unit")

    with running(Client(), episode(reward), Plan(groups=3, group_size=2)) as runner:
        runner.advance(0)
        runner.next_batch(timeout=20)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0: 2 episodes failed so far; the last with KeyError: 'no unit'"
    ]


def test_rank_and_size_are_those_of_the_world_unless_set() -> None:
    with running(Client(), episode(), Plan(groups=4)) as runner:
        assert (runner.place, runner.rank, runner.size) == (None, 0, 1)
        runner.set_place(1, 3)
        assert (runner.place, runner.per_batch) == ((1, 3), 1)
    for wrong in ({"rank": 1}, {"size": 2}, {"rank": 2, "size": 2}, {"rank": -1, "size": 2}):
        with pytest.raises(ValueError, match="0 <= rank < size"):
            Runner(Client(), episode(), ITEMS, Plan(groups=1), **wrong)


def test_keep_errors_and_invalid_arguments_raise() -> None:
    def keep(group: list[Sequence]) -> bool:
        raise ZeroDivisionError("no spread")

    with running(Client(), episode(), Plan(groups=1), keep=keep) as runner:
        runner.advance(0)
        with pytest.raises(RuntimeError, match="no spread"):
            runner.next_batch(timeout=20)
    with pytest.raises(ValueError, match="group_size = 0"):
        Plan(groups=1, group_size=0)
    with pytest.raises(ValueError, match="items is empty"):
        Runner(Client(), episode(), [], Plan(groups=1))


@pytest.mark.parametrize("staleness", [0, 2])
def test_runner_resumes_from_state(staleness: int) -> None:
    """Groups not consumed yet are in the state; nothing is played twice or left out."""
    plan = Plan(groups=3, group_size=2, max_staleness=staleness, max_concurrent=4)
    full = batches(6, plan)
    client = Client(lambda: 0.01)
    with running(client, episode(), plan) as runner:
        first = []
        for trained in range(3):
            runner.advance(trained)
            first.append(tokens(runner.next_batch(timeout=20)))
        runner.advance(3)
        wait_until(lambda: len(runner.state_dict()["waiting"]) >= staleness, "groups wait")
        state = runner.state_dict()
        fourth = tokens(runner.next_batch(timeout=20))
    again = Client()
    with running(again, episode(), plan) as runner:
        runner.load_state_dict(state)
        rest = []
        for trained in range(3, 6):
            runner.advance(trained)
            rest.append(tokens(runner.next_batch(timeout=20)))
    assert [*first, *rest] == full
    assert fourth == rest[0]
    waiting = [Sequence.of_state(each) for group in state["waiting"] for each in group["sequences"]]
    done = {int(sequence.segments[1].tokens[1]) for sequence in waiting}
    assert not done & {seed for _, seed in again.asked}


def test_close_cancels_running_episodes() -> None:
    ended = []

    class Endless:
        async def run(self, client: Any, item: int) -> list[Sequence]:
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(item)
            return []

    with running(Client(), Endless(), Plan(groups=4)) as runner:
        runner.advance(0)
        with pytest.raises(TimeoutError, match="4 groups are being played"):
            runner.next_batch(timeout=0.2)
    assert len(ended) == 4
    with pytest.raises(RuntimeError, match="closed"):
        runner.next_batch()
    runner.close()


def test_sequence_converts_to_training_sample() -> None:
    completion = Completion((7, 8, 9), (-0.5, -1.5, -2.5), (3, 3, 4), "length")
    sample = Sequence.single([5, 6], completion, reward=0.25).sample()
    assert sample["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert sample["loss_mask"].tolist() == [0, 1, 1, 1, 0]
    assert sample["rollout_logprobs"].tolist() == [0, -0.5, -1.5, -2.5, 0]
    assert sample["versions"].tolist() == [0, 3, 3, 4, 0]
    assert sample["rewards"].item() == 0.25
    assert sample["truncated"].item() is True


def test_invalid_sequence_fails_its_episode() -> None:
    wrong = {
        1: {"reward": float("nan")},
        2: {"segments": (Segment([5], trainable=False),)},
        3: {"segments": (Segment([5, 6], trainable=True, values={"rollout_logprobs": [0.0]}),)},
    }

    class Wrong:
        async def run(self, client: Any, item: int) -> list[Sequence]:
            fields = {"segments": (Segment([5, 6], trainable=True),), "reward": 1.0, **wrong.get(item, {})}
            return [Sequence(**fields)]

    with running(Client(), Wrong(), Plan(groups=5, shuffle=False)) as runner:
        runner.advance(0)
        groups = runner.next_batch(timeout=20)
    assert [group.failed for group in groups] == [0, 1, 1, 1, 0]
    for group, word in zip(groups[1:4], ("finite", "wrote", "one for each"), strict=True):
        assert word in str(group.error)


def test_report_computes_rollout_metrics() -> None:
    def sequence(reward: float, tokens: int, version: int, **fields: Any) -> Sequence:
        completion = Completion(tuple(range(3, 3 + tokens)), (-1.0,) * tokens, (version,) * tokens, "stop")
        return replace(Sequence.single([1, 2], completion, reward), **fields)

    groups = [
        Group(0, (sequence(1.0, 2, 4), sequence(0.0, 4, 5, truncated=True)), failed=1, error="KeyError: x"),
        Group(1, (sequence(1.0, 30, 5), sequence(1.0, 6, 3, stats={"turns": 3.0}))),
        Group(2, ()),
    ]
    report = RolloutReport(groups, max_tokens=20, version=5)
    actual = report.reduce(lambda x: x)
    assert len(report.samples) == 3
    assert actual["rollout/reward"] == pytest.approx(2 / 3)
    assert actual["rollout/reward_std"] == pytest.approx((2 / 9) ** 0.5)
    assert actual["rollout/tokens"] == 4
    assert actual["rollout/staleness"] == 1
    assert actual["rollout/truncated"] == pytest.approx(1 / 3)
    assert actual["rollout/flat_groups"] == pytest.approx(2 / 3)
    assert (actual["rollout/failed"], actual["rollout/overlong"], actual["rollout/sequences"]) == (1, 1, 3)
    assert actual["rollout/turns"] == 3
    fewer = RolloutReport(groups, max_tokens=20, version=5, skip_flat=True)
    assert [int(sample["group_ids"]) for sample in fewer.samples] == [int(groups[0].sequences[0].group)] * 2
    assert fewer.reduce(lambda x: x) == actual
    with pytest.raises(RuntimeError, match=r"1 failed, 0 were too long\. The first errors of the ranks:\nKeyError: x"):
        RolloutReport([Group(0, (), failed=1, error="KeyError: x")], None, 0).reduce(lambda x: x)


@pytest.mark.parametrize(
    ("failed", "limit", "ends"), [(1, 0.1, False), (2, 0.1, True), (9, None, False), (1, 0.0, True)]
)
def test_share_of_failed_episodes_is_limited(failed: int, limit: float | None, ends: bool) -> None:
    answer = Completion((3,), (-1.0,), (0,), "stop")
    sequences = tuple(replace(Sequence.single([1], answer, 1.0), episode=number) for number in range(10 - failed))
    report = RolloutReport([Group(0, sequences, failed, "KeyError: x")], None, 0, max_failed_share=limit)
    if ends:
        with pytest.raises(RuntimeError, match=rf"{failed} of 10 episodes .* = {limit:g}: .*\nKeyError: x"):
            report.reduce(lambda x: x)
    else:
        assert report.reduce(lambda x: x)["rollout/failed"] == failed


def test_reward_is_the_mean_over_episodes() -> None:
    """An episode of several sequences counts once, with the mean of their rewards, as in the baseline of its group."""
    answer = Completion((3,), (-1.0,), (0,), "stop")
    single = Sequence.single([1], answer, 1.0)
    rewards = {0: [1.0], 1: [0.0, 0.5, 0.0, 0.5]}
    sequences = [replace(single, reward=reward, episode=number) for number in rewards for reward in rewards[number]]
    scalars = RolloutReport([Group(0, tuple(sequences))], None, 0).reduce(lambda x: x)
    assert scalars["rollout/reward"] == pytest.approx((1 + 0.25) / 2)
    assert scalars["rollout/reward_std"] == pytest.approx((1 - 0.25) / 2)
    assert scalars["rollout/sequences"] == 5


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 3)])
def test_runner_resumes_on_another_number_of_ranks(before: int, after: int) -> None:
    plan = Plan(groups=4, group_size=2, max_staleness=1)
    full = batches(5, plan)
    states = []
    for rank in range(before):
        with running(Client(), episode(), plan, rank=rank, size=before) as runner:
            for trained in range(2):
                runner.advance(trained)
                runner.next_batch(timeout=20)
            runner.advance(2)
            states.append(runner.state_dict())
    rest = []
    for rank in range(after):
        with running(Client(), episode(), plan, rank=rank, size=after) as runner:
            set_runner_state(runner, states)
            actual = []
            for trained in range(2, 5):
                runner.advance(trained)
                actual.append(tokens(runner.next_batch(timeout=20)))
            rest.append(actual)
    assert [sorted(group for steps in rest for group in steps[step]) for step in range(3)] == full[2:]


@pytest.mark.parametrize("after", [2, 3])
def test_replaced_groups_are_resharded(after: int) -> None:
    """None is played twice or left out, although the ranks had replaced different numbers of groups."""
    plan = Plan(groups=4, max_staleness=1, shuffle=False)
    kept, states, consumed = lambda group: group[0].group % 5 > 1, [], set()
    for rank in range(2):
        with running(Client(), episode(), plan, keep=kept, rank=rank, size=2) as runner:
            for trained in range(3):
                runner.advance(trained)
                consumed |= {group.index for group in runner.next_batch(timeout=20)}
            runner.advance(3)
            wait_until(lambda: len(runner._order.waiting) >= 4, "groups wait")
            states.append(runner.state_dict())
    if after == 2:  # a state of an earlier release has consecutive groups, and none of the newer keys
        for state in states:
            rejected = sum(not isinstance(each, dict) for each in state["waiting"])
            state["rejected"] = state["consumed"] + len(state["ahead"]) + rejected - 3 * 2
            for name in ("numbers", "begun", "ahead", "batches"):
                del state[name]
    per_rank = []
    for rank in range(after):
        with running(Client(), episode(), plan, keep=kept, rank=rank, size=after) as runner:
            set_runner_state(runner, states)
            batches_after = []
            for trained in range(3, 7):
                runner.advance(trained)
                batches_after.append([group.index for group in runner.next_batch(timeout=20)])
            per_rank.append(batches_after)
    for step in range(4):
        batch = [index for each in per_rank for index in each[step]]
        assert len(batch) == 4
        assert not consumed & set(batch)
        consumed |= set(batch)
    expected = [index for index in range(max(consumed)) if index % 5 > 1]
    assert len(set(expected) - consumed) <= 4, "only those of ranks that replaced fewer"


def test_disagreement_covers_policy_tokens_only() -> None:
    samples = [
        {
            "loss_mask": torch.tensor([0.0, 1.0, 1.0, 0.0]),
            "old_logprobs": torch.tensor([9.0, -1.0, -2.0, 9.0]),
            "rollout_logprobs": torch.tensor([0.0, -1.5, -1.0, 0.0]),
        }
    ]
    engine: Any = SimpleNamespace(global_sum=lambda x: x)
    actual = mismatch(engine, samples)
    assert actual["rollout/logprob_error"] == pytest.approx(0.75)
    k3 = ((math.exp(0.5) - 1 - 0.5) + (math.exp(-1) - 1 + 1)) / 2
    assert actual["rollout/logprob_k3"] == pytest.approx(k3)
    assert mismatch(engine, []) == {}, "what was not measured is absent"
