"""The runs of ``recipes/``: each file has settings that exist, and takes a step on a tiny model."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.cli.run_recipe import run_recipe
from areal.recipes import DistillConfig, DPOConfig, GRPOConfig, RewardModelConfig, SFTConfig
from areal.recipes.functions import load_function
from areal.tests.harness.recipes.recipe_data import recipe_model
from areal.tests.harness.world import one_rank
from areal.trainer.trackers import read_metrics

ROOT = Path(__file__).parents[4]
CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "rm": RewardModelConfig, "grpo": GRPOConfig, "distill": DistillConfig}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.toml"))
SMALL = {
    "sft": ("steps=1", "batch_size=2"),
    "dpo": ("steps=1", "batch_size=2", "eval_every=1"),
    "rm": ("steps=1", "batch_size=2", "eval_every=1"),
    "grpo": ("steps=1", "groups=2", "group_size=2", "max_new_tokens=4"),
    "distill": ("steps=1", "groups=2", "max_new_tokens=4"),
}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="needs a C compiler to be installed, see docs/installation.md")
    monkeypatch.chdir(ROOT)


def command(file: str) -> tuple[str, list[str]]:
    """Return the recipe and the files of the command in the first line of a file."""
    first = (ROOT / file).read_text().splitlines()[0]
    comment, program, name, *files = first.split()
    assert (comment, program) == ("#", "areal"), first
    assert files[-1] == file
    return name, files


@pytest.mark.parametrize("file", FILES)
def test_file_takes_a_step(file: str, tmp_path: Path) -> None:
    name, files = command(file)
    settings = {key: value for path in files for key, value in tomllib.loads((ROOT / path).read_text()).items()}
    config = CONFIGS[name](**settings)
    assert config.steps is None or config.steps >= 12
    # A few rows of the data, and a model of two layers.
    few = {}
    for key in ("dataset", "evaluation"):
        if key in settings:
            few[key] = tmp_path / f"{key}.jsonl"
            few[key].write_text("\n".join(json.dumps(row) for row in load_function(settings[key])()[:6]))
    model = recipe_model(1024)
    options = [f"{key}={path}" for key, path in few.items()] + [f"model={model}", f"output={tmp_path / 'out'}"]
    options += [f"teacher={model}"] if name == "distill" else []
    with one_rank():
        assert run_recipe(name, [*files, *options, *SMALL[name], "dtype=float32"]) == 0
    steps = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert max(steps) == 1
    assert all(math.isfinite(value) for value in steps[1].values())
    assert ("evaluation" in settings) == any(key.startswith("eval/") for key in steps[1])
    if name == "distill":
        # Student and teacher are the same model.
        assert abs(steps[1]["actor/kl_ref/k1"]) < 1e-5


def test_each_recipe_has_a_readme_with_its_commands() -> None:
    for folder in {Path(file).parent for file in FILES}:
        readme = (ROOT / folder / "README.md").read_text()
        for file in (file for file in FILES if Path(file).parent == folder):
            assert file in readme, f"{folder}/README.md does not name {file}"


def test_parts_of_the_data_are_apart() -> None:
    parts = [load_function(f"recipes/arithmetic/problems.py:{name}")() for name in ("held_out", "shown", "train")]
    questions = [{entry.get("prompt") or entry["question"] for entry in part} for part in parts]
    assert [len(part) for part in parts] == [len(each) for each in questions]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(questions, 2))
    reward: Callable[[Any, str], float] = load_function("recipes/arithmetic/problems.py:reward")
    first = parts[0][0]
    assert (reward(first, f" {first['answer']}\n"), reward(first, "about 7")) == (1.0, 0.0)
    calculator = "recipes/calculator/task.py"
    asked = [{row["question"] for row in load_function(f"{calculator}:{name}")()} for name in ("held_out", "train")]
    assert asked[0].isdisjoint(asked[1])
    for row in load_function(f"{calculator}:shown")():
        *_, last_call, result, answer = row["messages"]
        called = last_call["tool_calls"][0]["function"]["arguments"]
        assert load_function(f"{calculator}:calculate")(**called) == result["content"] == answer["content"]


def test_comparison_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "recipes" / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare)
    # The sign test: of all 2**n outcomes of n rows that change, those with at least as many rises.
    for rose, fell in ((0, 0), (3, 0), (2, 3), (7, 1)):
        before, after = [0.0] * rose + [1.0] * fell + [1.0, 0.0], [1.0] * rose + [0.0] * fell + [1.0, 0.0]
        outcomes = list(itertools.product((0, 1), repeat=rose + fell))
        expected = sum(sum(outcome) >= rose for outcome in outcomes) / len(outcomes)
        assert compare.p_value_of_rise(before, after) == pytest.approx(expected, rel=1e-12)
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": step, "time": 0.0, "rollout/reward": 0.5, "eval/reward": step / 9} for step in range(10)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rewards = ([[0.0]] * 8, [[1.0]] * 7 + [[0.0]])
    text = "\n".join(json.dumps({"step": 9 * step, "rewards": its}) for step, its in enumerate(rewards))
    (run / "evaluations.jsonl").write_text(text)
    assert compare.main((run,), picture=tmp_path / "curves.png", max_p_value=0.01) == 0
    assert "eval/reward 0.000 -> 1.000 on 8 rows, p = 0.008" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert compare.main((run,), max_p_value=0.005) == 1
    assert compare.main((run,), min_p_value=0.01) == 1
    assert compare.main((run,), max_loss_ratio=0.5) == 1
