"""TRL's asynchronous GRPO on rollouts of this package."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed: make test-trl")

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from areal.inference import LocalRollout
from areal.inference.http import VLLM, HTTPRollout
from areal.inference.protocol import Completion, Sampling
from areal.integrations.trl import RolloutWorker, rewarded_answer
from areal.tests.harness.servers.rollout_http import Process
from areal.tests.trl import tiny
from areal.tests.trl.curves import Curve, differences
from areal.tests.trl.trl_loop import TRLWorker, without_gpu
from areal.trainer.rollout import Sequence, SingleTurn
from areal.utils.data.sequences import Segment


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def rollout(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRollout]:
    without_gpu(monkeypatch)
    with tiny.local_rollout(path) as made:
        yield made


def config(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    """Return a configuration of steps of four groups of four answers."""
    defaults = {
        "max_steps": 12,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 16,
        "token_budget": 0,
        "max_staleness": 1,
        "learning_rate": 1e-3,
        "seed": 3,
    }
    fixed = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return AsyncGRPOConfig(str(folder), **{**defaults, **fixed, **changes})


def worker(rollout: Any, args: AsyncGRPOConfig, episode: Any = None, *, reproducible: bool = True) -> RolloutWorker:
    tokens = tiny.tokenizer()
    episode = episode or rewarded_answer(args, tokens, tiny.reward)
    return RolloutWorker(rollout, tiny.data_set(), args, tokens, episode, reproducible)


def train(path: str, args: AsyncGRPOConfig, ours: Any) -> Curve:
    items = tiny.data_set()
    trainer = AsyncGRPOTrainer(path, tiny.reward, args, items, rollout_worker=ours, weight_transfer=ours)
    trainer.train()
    return Curve.of(trainer, trainer.model.named_parameters())


@pytest.mark.parametrize("staleness", [1, 3])
def test_the_curve_is_that_of_the_own_rollout_loop(
    path: str, rollout: LocalRollout, tmp_path: Path, compare: Callable[..., Any], staleness: int
) -> None:
    args = config(tmp_path, max_staleness=staleness)
    ours = train(path, args, worker(rollout, args))
    with tiny.local_rollout(path) as another:
        own = TRLWorker(another, tiny.data_set(), args, tiny.tokenizer(), [tiny.reward])
        theirs = train(path, config(tmp_path, max_staleness=staleness), own)
    found = compare(f"AsyncGRPOTrainer, max_staleness={staleness}", theirs, ours)
    assert theirs.rewards() == pytest.approx(ours.rewards(), rel=1e-12)
    assert found["lr"] == 0
    assert max(found["loss"], found["grad norm"], found["entropy"], found["weights"]) < 1e-4
    assert len(set(ours.rewards())) > 6


def test_equal_seeds_give_equal_runs(path: str, rollout: LocalRollout, tmp_path: Path) -> None:
    args = config(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=8)
    one = train(path, args, worker(rollout, args))
    with tiny.local_rollout(path) as another:
        two = train(path, args, worker(another, args))
    assert one.rewards() == two.rewards()
    assert differences(one, two)["weights"] < 1e-4


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize(("staleness", "sync_steps"), [(1, 1), (2, 2)])
def test_staleness_is_bounded_and_no_sample_is_discarded(
    path: str, rollout: LocalRollout, tmp_path: Path, staleness: int, sync_steps: int, reproducible: bool
) -> None:
    args = config(tmp_path, max_staleness=staleness, weight_sync_steps=sync_steps)
    curve = train(path, args, worker(rollout, args, reproducible=reproducible))
    assert all(log.get("sample/dropped_stale_total") is None for log in curve.logs)
    assert max(log["sample/staleness_max"] for log in curve.logs) <= staleness
    # The first step trains on answers of its own weights: the behaviour log-probs are the trainer's.
    assert curve.logs[0]["ratio"] == pytest.approx(1, abs=1e-5)


@pytest.fixture
def vllm(path: str) -> Iterator[Process]:
    process = Process(path, modern=True)
    yield process
    process.kill()


def test_answers_of_a_server_have_the_log_probs_of_the_trainer(
    path: str, vllm: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    args = config(tmp_path, max_steps=6)
    with HTTPRollout([vllm.url], VLLM(), folder=tmp_path / "weights", model=path) as rollout:
        curve = train(path, args, worker(rollout, args))
    # An update before the first step, and one after each.
    assert vllm.calls("/collective_rpc") == 7
    assert max(log["sample/staleness_max"] for log in curve.logs) <= 1
    assert all(log.get("sample/dropped_stale_total") is None for log in curve.logs)
    assert curve.logs[0]["ratio"] == pytest.approx(1, abs=1e-5)


def test_a_sample_has_the_version_of_its_oldest_token(rollout: LocalRollout, tmp_path: Path) -> None:
    args = config(tmp_path, per_device_train_batch_size=2, num_generations=2, max_staleness=1)

    class TwoTurns:
        async def run(self, client: Any, item: Any) -> list[Sequence]:
            prompt = Segment([5, 6], trainable=False)
            first = Completion((7, 8), (-0.5, -0.25), (4, 5), "stop")
            tool = Segment([9], trainable=False)
            second = Completion((10,), (-1.0,), (6,), "stop")
            return [Sequence((prompt, first.segment(), tool, second.segment()), 2.0, stats={"rewards/mine": 2.0})]

    made = worker(rollout, args, TwoTurns())
    made.update_model_version(1)
    made.start()
    try:
        sample = made.rollout_buffer.get(timeout=30)
    finally:
        made.stop()
    assert sample.model_version == 4
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert sample.completion_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert sample.old_log_probs.tolist() == [0, 0, -0.5, -0.25, 0, -1.0]
    assert sample.advantage == 0
    assert sample.metrics == {"reward": 2.0, "reward_std": 0.0, "sample/versions_mean": 3.0, "rewards/mine": 2.0}


def test_a_failed_episode_ends_the_run_with_its_traceback(path: str, rollout: LocalRollout, tmp_path: Path) -> None:
    args = config(tmp_path)

    def broken(**_: Any) -> list[float]:
        raise KeyError("no such column")

    made = worker(rollout, args, rewarded_answer(args, tiny.tokenizer(), broken))
    with pytest.raises(
        RuntimeError, match=r"(?s)group 0: 0 sequences, 4 failures; each must return one.*no such column"
    ):
        train(path, args, made)


def test_an_episode_of_two_sequences_is_refused(path: str, rollout: LocalRollout, tmp_path: Path) -> None:
    args = config(tmp_path)

    class Twice(SingleTurn):
        async def run(self, client: Any, item: Any) -> list[Sequence]:
            return (await super().run(client, item)) * 2

    episode = Twice(lambda item: [5, 6], lambda item, completion: 0.0, Sampling(4))
    with pytest.raises(RuntimeError, match="group 0: 8 sequences, 0 failures; each must return one"):
        train(path, args, worker(rollout, args, episode))


def test_a_worker_that_hangs_is_noticed(rollout: LocalRollout, tmp_path: Path) -> None:
    made = worker(rollout, config(tmp_path))
    made.check_health(60)
    time.sleep(0.02)
    with pytest.raises(RuntimeError, match=r"no sign of life for heartbeat_stale_after_s = 0.01"):
        made.check_health(0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": None}, r"AsyncGRPOConfig.token_budget = None: .*set it to 0"),
        ({"token_budget": 512}, r"AsyncGRPOConfig.token_budget = 512: .*set it to 0"),
        ({"max_staleness": 0}, r"AsyncGRPOConfig.max_staleness = 0: .*set it to at least 1"),
        ({"num_generations": 5}, r"AsyncGRPOConfig.num_generations = 5: it must divide the 16 samples"),
        ({"queue_maxsize": 31}, r"AsyncGRPOConfig.queue_maxsize = 31: .*set it to 32"),
        ({"top_p": 0.9}, r"AsyncGRPOConfig.top_p = 0.9: it is not supported; leave it at 1.0"),
        ({"min_p": 0.1}, r"AsyncGRPOConfig.min_p = 0.1: it is not supported; leave it at None"),
        ({"repetition_penalty": 1.1}, r"AsyncGRPOConfig.repetition_penalty = 1.1"),
        ({"log_completions": True}, r"AsyncGRPOConfig.log_completions = True"),
        (
            {"resume_from_checkpoint": "out/checkpoint-6"},
            r"AsyncGRPOConfig.resume_from_checkpoint = 'out/checkpoint-6': .*pass the rest of the items",
        ),
    ],
)
def test_options_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worker(None, config(tmp_path, **changes))


def test_a_checkpoint_of_train_alone_does_not_move_the_items(path: str, rollout: LocalRollout, tmp_path: Path) -> None:
    train(path, config(tmp_path, max_steps=2, save_strategy="steps", save_steps=2), worker(rollout, config(tmp_path)))
    asked: list[Any] = []

    def record(completions: Any, letter: Any, prompts: Any, **_: Any) -> list[float]:
        asked.append(prompts[0])
        return tiny.reward(completions, letter)

    args, rest = config(tmp_path, max_steps=3), tiny.data_set().select(range(8, 64))
    episode = rewarded_answer(args, tiny.tokenizer(), record)
    ours = RolloutWorker(rollout, rest, args, tiny.tokenizer(), episode, reproducible=True)
    trainer = AsyncGRPOTrainer(path, tiny.reward, args, tiny.data_set(), rollout_worker=ours, weight_transfer=ours)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    # Two steps of four groups came before, and the rest begins with its first item.
    assert trainer.state.global_step == 3
    assert all(rest[i]["prompt"] in asked for i in range(4))


def test_limits_of_the_plan_are_those_of_trl(tmp_path: Path) -> None:
    plan = worker(None, config(tmp_path, max_inflight_tasks=8, max_staleness=2, weight_sync_steps=2))._plan
    assert (plan.groups, plan.group_size, plan.max_staleness, plan.max_concurrent) == (8, 4, 2, 8)
    assert worker(None, config(tmp_path))._plan.max_concurrent == 32


def test_columns_and_template_reach_reward_functions(tmp_path: Path) -> None:
    tokens, seen = tiny.tokenizer(), []

    def record(prompts: Any, completions: Any, completion_ids: Any, letter: Any) -> list[float]:
        seen.append((prompts, completions, completion_ids, letter))
        return [0.5]

    class Client:
        version = 0

        async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
            assert tokens.decode(prompt_ids).endswith("<|im_start|>assistant\n")
            assert (sampling.max_new_tokens, sampling.temperature) == (16, 0.7)
            return Completion((4, 5, 2), (-1.0,) * 3, (1,) * 3, "stop", sampling)

    episode = rewarded_answer(config(tmp_path, temperature=0.7), tokens, record, record)
    item = tiny.data_set()[0]
    (sequence,) = asyncio.run(episode.run(Client(), item))
    episode.close()
    assert sequence.reward == 1.0
    assert seen[0] == ([item["prompt"]], [[{"role": "assistant", "content": "ab"}]], [[4, 5, 2]], [item["letter"]])
    assert replace(sequence, reward=0.5).trained_tokens == 3
