"""GRPO on a rollout of vLLM: its log-probs are the trainer's."""

from __future__ import annotations

import statistics
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from areal.api import MicroBatchSpec, OptimizerConfig
from areal.inference.http import VLLM, HTTPRollout
from areal.recipes import grpo
from areal.tests.dist.recipes.policy_runs import SMALL, curve
from areal.tests.harness.recipes.recipe_data import reward as letters
from areal.tests.harness.recipes.recipe_data import rows, save_model
from areal.tests.harness.rl import Curve, Prompts, reward
from areal.tests.harness.tiny import started
from areal.tests.harness.world import one_rank
from areal.tests.vllm import server
from areal.tests.vllm.answers import endless
from areal.tests.vllm.server import VLLMProcess, served_model
from areal.trainer.grpo import grpo_trainer
from areal.trainer.rollout.episodes import SingleTurn
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner

pytestmark = server.marks


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_three_steps_of_grpo_have_the_trainers_log_probs(vllm: VLLMProcess, tmp_path: Path, max_staleness: int) -> None:
    curve = Curve()
    episode = SingleTurn(lambda item: item, reward, endless(24))
    plan = Plan(groups=8, group_size=8, max_staleness=max_staleness, seed=1)
    settings = {"optimizer": OptimizerConfig(lr=1e-3), "mb_spec": MicroBatchSpec(max_tokens_per_mb=2048)}
    with (
        started("fsdp:d1", path=served_model(), **settings) as engine,
        HTTPRollout(vllm.url, VLLM(), folder=tmp_path, model=served_model(), deadline=120) as rollout,
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


# ---- a recipe that starts the server

COMMAND = (
    f"env -u PYTHONPATH VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 {server.PYTHON} -W ignore"
    " -m vllm.entrypoints.openai.api_server --dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 64"
    " --no-enable-chunked-prefill --model"
)
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
"""Sizes that vLLM's attention has on a CPU."""
SETTINGS: dict[str, Any] = {**SMALL, "steps": 8, "groups": 6, "group_size": 6, "eval_samples": 8}


def test_three_seeds_have_the_curve_of_a_replica(tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    save_model(Path(model), **SIZES, max_position_embeddings=256)
    after: dict[str, list[float]] = {"replica": [], "vLLM": []}
    for where, its in {"replica": {}, "vLLM": {"start_server": COMMAND}}.items():
        for seed in range(3):
            output = tmp_path / f"{where}-{seed}"
            settings = {**SETTINGS, **its, "seed": seed, "output": output}
            with one_rank():
                grpo(model, rows(24), letters, evaluation=rows(8, 1), **settings).train()
            got = curve(output, ("eval/reward", "rollout/logprob_error"))
            first, last = got["eval/reward"]
            print(
                f"{where}, seed {seed}: reward {first:.3f} -> {last:.3f}, log-prob error {max(got['rollout/logprob_error']):.1e}"
            )
            assert last > first + 0.1
            assert max(got["rollout/logprob_error"]) < 1e-4
            after[where].append(last)
    error = sum(statistics.variance(each) / 3 for each in after.values()) ** 0.5
    assert abs(statistics.fmean(after["replica"]) - statistics.fmean(after["vLLM"])) < max(3 * error, 0.1), after
