"""Recipes of the published cookbook, unmodified and offline, and those of ``examples/tinker``, against ``areal serve``: each runs,
stops, resumes and goes on.

``make test-cookbook`` makes their environment and the model, and runs these tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.tests.tinker.cookbook.environment import PYTHON, output_of
from areal.tests.tinker.sdk.server import ROOT, ServerProcess

MODEL = ROOT / "runs" / "SmolLM2-135M-Instruct"
EXAMPLES = ROOT / "examples" / "tinker"

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (PYTHON.exists() and (MODEL / "config.json").exists()), reason="needs what `make test-cookbook` makes"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server"), str(MODEL), name=str(MODEL), threads=os.cpu_count() or 1)
    yield process
    assert process.stop() == 0, process.text


def run(server: ServerProcess, log: Path, *command: str, **options: Any) -> list[dict[str, float]]:
    """Run a recipe of the cookbook, and return its metrics by step, those of earlier runs in the same folder included."""
    given = {"model_name": str(MODEL), "renderer_name": "role_colon", "log_path": str(log), "eval_every": 0, **options}
    output_of(server, *command, *(f"{name}={value}" for name, value in given.items()))
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def column(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_arithmetic_rewards_rise_across_a_resume(server: ServerProcess, tmp_path: Path) -> None:
    options = {
        "env": "arithmetic",
        "loss_fn": "importance_sampling",
        "groups_per_batch": 12,
        "group_size": 8,
        "max_tokens": 8,
        "learning_rate": 1e-3,
        "lora_rank": 16,
        "save_every": 4,
    }
    recipe = ("-m", "tinker_cookbook.recipes.math_rl.train")
    run(server, tmp_path / "log", *recipe, **options, max_steps=8, behavior_if_log_dir_exists="delete")
    rows = run(server, tmp_path / "log", *recipe, **options, max_steps=16, behavior_if_log_dir_exists="resume")
    assert [row["step"] for row in rows] == list(range(16))
    rewards = column(rows, "env/all/reward/total")
    print("rewards", [round(reward, 3) for reward in rewards])
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last > first + 0.1
    # Log-probs of the sampler and of training are those of the same weights.
    assert max(map(abs, column(rows, "optim/kl_sample_train_v1"))) < 1e-3


def test_chat_resumes_and_loss_falls(server: ServerProcess, tmp_path: Path) -> None:
    find = "import tinker_cookbook, pathlib; print(pathlib.Path(tinker_cookbook.__file__).parent / 'example_data' / 'conversations.jsonl')"
    data = subprocess.run([str(PYTHON), "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    options = {
        "dataset": data,
        "batch_size": 4,
        "max_length": 128,
        "learning_rate": 5e-4,
        "lora_rank": 8,
        "save_every": 2,
        "lr_schedule": "constant",
        "num_epochs": 8,
        "infrequent_eval_every": 0,
        "train_on_what": "all_assistant_messages",
    }
    recipe = ("-m", "tinker_cookbook.recipes.chat_sl.train")
    run(server, tmp_path / "log", *recipe, **options, max_steps=3, behavior_if_log_dir_exists="delete")
    # As if the run was interrupted: the recipe regards one with a final checkpoint as complete.
    file = tmp_path / "log" / "checkpoints.jsonl"
    saved = [line for line in file.read_text().splitlines() if json.loads(line)["name"] != "final"]
    assert saved
    file.write_text("\n".join(saved) + "\n")
    rows = run(server, tmp_path / "log", *recipe, **options, max_steps=6, behavior_if_log_dir_exists="resume")
    losses = column(rows, "train_mean_nll")
    print("losses", [round(loss, 3) for loss in losses])
    assert max(row["step"] for row in rows) == 5
    assert losses[-1] < losses[0]


def test_guess_number_runs_several_turns_and_resumes(server: ServerProcess, tmp_path: Path) -> None:
    options = {"batch_size": 2, "group_size": 2, "max_tokens": 8, "learning_rate": 3e-4, "save_every": 1}
    recipe = ("-m", "tinker_cookbook.recipes.multiplayer_rl.guess_number.train")
    run(server, tmp_path / "log", *recipe, **options, max_steps=1, behavior_if_log_dir_exists="delete")
    rows = run(server, tmp_path / "log", *recipe, **options, max_steps=2, behavior_if_log_dir_exists="resume")
    assert [row["step"] for row in rows] == [0, 1]
    assert min(column(rows, "env/all/total_episodes")) == 4


@pytest.fixture(scope="module")
def supervised(server: ServerProcess) -> str:
    """Output of the supervised example."""
    return output_of(server, str(EXAMPLES / "tinker_sft.py"), "--min-rise", "0.2")


def saved_paths(text: str) -> list[str]:
    return re.findall(r"^saved (\S+)", text, re.MULTILINE)


def test_supervised_example_learns_and_resumes_exactly(server: ServerProcess, supervised: str) -> None:
    resumed = output_of(
        server, str(EXAMPLES / "tinker_sft.py"), "--resume", saved_paths(supervised)[0], "--eval-size", "4"
    )
    steps = [re.findall(r"^step .*", text, re.MULTILINE) for text in (supervised, resumed)]
    assert len(steps[1]) == 6
    assert steps[1] == steps[0][6:]


def test_rl_example_learns(server: ServerProcess, supervised: str) -> None:
    output_of(server, str(EXAMPLES / "tinker_rl.py"), "--from-state", saved_paths(supervised)[-1], "--min-rise", "0.02")
