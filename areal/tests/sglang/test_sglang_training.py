"""GRPO on a rollout of SGLang: its log-probs are the trainer's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from areal.api import MicroBatchSpec, OptimizerConfig
from areal.inference.http import HTTPRollout, SGLang
from areal.tests.harness.rl import Curve, Prompts, reward
from areal.tests.harness.tiny import started
from areal.tests.sglang import server
from areal.tests.sglang.server import SGLangProcess
from areal.tests.vllm.answers import endless
from areal.tests.vllm.server import served_model
from areal.trainer.grpo import grpo_trainer
from areal.trainer.rollout.episodes import SingleTurn
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner

pytestmark = server.marks


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_three_steps_of_grpo_have_the_trainers_log_probs(
    sglang: SGLangProcess, tmp_path: Path, max_staleness: int
) -> None:
    curve = Curve()
    episode = SingleTurn(lambda item: item, reward, endless(24))
    plan = Plan(groups=8, group_size=8, max_staleness=max_staleness, seed=1)
    settings = {"optimizer": OptimizerConfig(lr=1e-3), "mb_spec": MicroBatchSpec(max_tokens_per_mb=2048)}
    with (
        started("fsdp:d1", path=served_model(), **settings) as engine,
        HTTPRollout(sglang.url, SGLang(), folder=tmp_path, model=served_model(), deadline=120) as rollout,
    ):
        rollout.load(served_model(), 0)
        with closing(Runner(rollout, episode, Prompts(), plan)) as runner:
            trainer = grpo_trainer(
                engine, runner, lambda source, version: rollout.update(source.named_tensors(), version), tracker=curve
            )
            trainer.train(3)
        assert rollout.version >= 2
    print([{name: step[name] for name in step if name.startswith("rollout/")} for step in curve.steps])
    assert len(curve.steps) == 3
    # Each step trained: the next one has other weights.
    assert all(step["actor/grad_norm"] > 0 for step in curve.steps)
    if max_staleness:
        assert max(curve["rollout/staleness"]) > 0
    else:
        assert set(curve["rollout/staleness"]) == {0}
        assert max(curve["rollout/logprob_error"]) <= 1e-5
