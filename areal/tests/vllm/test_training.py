"""GRPO on a rollout of vLLM: its log-probs are the trainer's."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from areal.inference.http import VLLM
from areal.recipes import grpo
from areal.tests.dist.recipes.policy_runs import SMALL, curve
from areal.tests.harness.recipes.recipe_data import reward as letters
from areal.tests.harness.recipes.recipe_data import rows, save_model
from areal.tests.harness.world import one_rank
from areal.tests.vllm import server
from areal.tests.vllm.server import VLLMProcess
from areal.tests.vllm.updates import three_steps_of_grpo

pytestmark = server.marks


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_three_steps_of_grpo_have_the_trainers_log_probs(vllm: VLLMProcess, tmp_path: Path, max_staleness: int) -> None:
    three_steps_of_grpo(vllm.url, VLLM(), tmp_path, max_staleness)


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
