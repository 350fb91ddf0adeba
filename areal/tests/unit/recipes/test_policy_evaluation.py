"""Evaluations: pass@k, confidence intervals, seeds, ranks that play, and errors."""

import asyncio
import itertools
import statistics
from typing import Any

import pytest

from areal.inference import Completion, Sampling
from areal.recipes.evaluation import PolicyEvaluation, pass_at_k, reward_scalars
from areal.recipes.record.progress import Results
from areal.tests.harness.limits import promptly
from areal.trainer.rollout import SingleTurn


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers() -> None:
    for passed in range(6):
        answers = [True] * passed + [False] * (5 - passed)
        for k in range(1, 6):
            chosen = list(itertools.combinations(answers, k))
            assert pass_at_k(5, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_scalars_of_rewards() -> None:
    rewards = [[1.0, 0.0, 0.5, 1.0], [0.0] * 4, [1.0] * 4]
    got = reward_scalars(rewards, 1.0)
    means = [0.625, 0.0, 1.0]
    assert got["eval/reward"] == pytest.approx(statistics.fmean(means))
    assert got["eval/reward_ci95"] == pytest.approx(1.959964 * statistics.stdev(means) / 3**0.5)
    assert got["eval/pass@1"] == pytest.approx(0.5)
    assert got["eval/pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert got["eval/pass@4"] == pytest.approx(2 / 3)
    assert set(got) == {
        f"eval/{name}{end}" for name in ("reward", "pass@1", "pass@2", "pass@4") for end in ("", "_ci95")
    }
    assert reward_scalars(rewards, 0.5)["eval/pass@1"] == pytest.approx((0.75 + 0 + 1) / 3)


class Echo:
    """Client whose answer is the seed of the request."""

    version = 0

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        assert sampling.seed is not None
        self.seeds.append(sampling.seed)
        return Completion((sampling.seed,), (0.0,), (0,), "stop", sampling)


def evaluation(client: Any, gather: Any, reward: Any = lambda row, answer: float(row), **changes: Any) -> Any:
    episode = SingleTurn(lambda row: [1], reward, Sampling())
    settings = {"samples": 2, "seed": 3, **changes}
    return PolicyEvaluation(client, episode, list(range(5)), gather=gather, **settings)


def test_two_evaluations_sample_the_same_and_another_seed_does_not() -> None:
    first, second, other = Echo(), Echo(), Echo()
    for client, seed in ((first, 3), (second, 3), (other, 4)):
        assert evaluation(client, lambda value: [value], seed=seed).rewards() == [[float(row)] * 2 for row in range(5)]
    assert sorted(first.seeds) == sorted(second.seeds)
    assert len(set(first.seeds)) == 10
    assert set(first.seeds).isdisjoint(other.seeds)


def test_an_error_of_an_episode_is_raised_with_its_text() -> None:
    def broken(row: Any, answer: Any) -> float:
        raise KeyError("solution")

    with pytest.raises(RuntimeError, match="an episode of the evaluation failed") as raised:
        evaluation(Echo(), lambda value: [value], broken).rewards()
    assert "in broken" in str(raised.value)
    assert "KeyError: 'solution'" in str(raised.value)


def test_an_episode_that_hangs_or_exits_is_raised() -> None:
    async def hangs(row: Any, answer: Any) -> float:
        if row == 3:
            await asyncio.sleep(60)
        return 1.0

    class Exits:
        async def run(self, client: Any, row: Any) -> Any:
            raise SystemExit(4)

    with promptly(), pytest.raises(RuntimeError, match=r"an episode of row 3 took longer than episode_seconds = 0\.5"):
        evaluation(Echo(), lambda value: [value], hangs, episode_seconds=0.5).rewards()
    with pytest.raises(RuntimeError, match="SystemExit: 4"):
        PolicyEvaluation(Echo(), Exits(), [0], gather=lambda value: [value], samples=1, seed=3).rewards()


def test_evaluation_where_an_event_loop_runs() -> None:
    async def in_a_notebook() -> Any:
        return evaluation(Echo(), lambda value: [value]).rewards()

    assert asyncio.run(in_a_notebook()) == [[float(row)] * 2 for row in range(5)]


def test_a_rank_without_servers_plays_nothing_and_knows_all() -> None:
    class Elsewhere(Echo):
        owns_servers = False

    others = {row: [float(row)] * 2 for row in range(5)}
    answers = iter([[False, True], [({}, None), (others, None)]])
    client = Elsewhere()
    assert evaluation(client, lambda value: next(answers)).rewards() == list(others.values())
    assert not client.seeds


def test_results_know_the_best_step() -> None:
    results = Results("eval/loss", larger_is_better=False)
    assert results.best_step is None
    assert results.since_best == 0
    better = [results.add(step, {"eval/loss": value}) for step, value in ((0, 3.0), (2, 1.0), (4, 1.0), (6, 2.0))]
    assert better == [True, True, False, False]
    assert (results.best_step, results.since_best) == (2, 2)
    again = Results("eval/loss", larger_is_better=False)
    again.load_state_dict(results.state_dict())
    assert again.by_step == results.by_step
    upwards = Results("eval/loss", larger_is_better=True)
    upwards.load_state_dict(results.state_dict())
    assert upwards.best_step == 0
