"""Every example runs on a tiny model, and prints and writes what its docstring says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import areal
from areal.recipes.functions import load_function
from areal.tests.harness.processes import needs_own_world
from areal.tests.unit.chat.chat_models import write_chat_model
from areal.trainer.trackers import read_metrics
from areal.utils.distributed import TORCHRUN_VARIABLES

ROOT = Path(areal.__file__).parents[1]
EXAMPLES = ROOT / "examples"
LINES = 60
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local", "RAY_worker_niceness": "0"}
"""A cluster of its own. Where the cores are busy, workers of the default niceness (15) take minutes to start."""


class Runner:
    """Runs scripts in a folder with a tiny model, ``tiny``.

    Attributes:
        printed: standard output of the last script.
        errors: its standard error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.printed, self.errors = folder, "", ""

    def __call__(self, script: str, *arguments: str, ranks: int = 1) -> str:
        """Run a script. Returns what it prints."""
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
        environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **RAY}
        command = [sys.executable, *launcher, str(EXAMPLES / script), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        self.printed, self.errors = done.stdout, done.stderr
        return done.stdout

    def number(self, name: str) -> str:
        """Return the number that the last script printed behind a name."""
        found = re.search(rf"^{name} (\S+)$", self.printed, re.MULTILINE)
        assert found, self.printed
        return found[1]

    def metrics(self, run: str) -> dict[int, dict[str, float]]:
        """Return the numbers of a run, by step."""
        return read_metrics(self.folder / "runs" / run / "metrics.jsonl")

    def has(self, run: str, *names: str) -> None:
        """Assert that a run has written files."""
        missing = [name for name in names if not (self.folder / "runs" / run / name).exists()]
        assert not missing


def training_step(run: Runner) -> None:
    losses = re.findall(r"^step \d: loss (\S+), gradient norm \S+$", run("training_step.py", "fsdp:d1", "tiny"), re.M)
    assert len(losses) == 5
    assert float(losses[-1]) < float(losses[0])


def sft(run: Runner) -> None:
    run("sft.py", "tiny", "5")
    assert run.number("held-out loss") == f"{run.metrics('sft')[5]['eval/loss']:.4f}"
    run.has("sft", "curves.png", "checkpoints/model/step-000005", "model/config.json")
    run("sft.py", "tiny", "6", "fsdp:d2", ranks=2)
    assert "resumed after step 5 of 6" in run.errors
    assert [step for step, its in run.metrics("sft").items() if "eval/loss" in its] == [0, 5, 6]
    assert run.number("held-out loss") == f"{run.metrics('sft')[6]['eval/loss']:.4f}"


def grpo(run: Runner) -> None:
    run("grpo.py", "tiny", "5")
    run.has("grpo", "curves.png", "samples.html", "checkpoints/policy/step-000005", "model/config.json")
    run("grpo.py", "tiny", "6")
    assert "resumed after step 5 of 6" in run.errors
    assert [step for step, its in run.metrics("grpo").items() if "eval/reward" in its] == [0, 5, 6]
    assert run.number("held-out reward") == f"{run.metrics('grpo')[6]['eval/reward']:.4f}"
    reward = load_function(f"{EXAMPLES / 'grpo.py'}:reward")
    assert [reward({"words": 4}, answer) for answer in ("a b c d", "a b c", "a " * 9)] == [1.0, 0.75, 0.0]


def preferences(run: Runner) -> None:
    for method in ("dpo", "rm"):
        run("preferences.py", method, "tiny", "2")
        expected = run.metrics(method)[2]["eval/preference/accuracy"]
        assert run.number("held-out accuracy") == f"{expected:.3f}"
        run.has(method, "model/config.json")
    run.has("rm", "model/value_head.safetensors")


def tools(run: Runner) -> None:
    run("tools.py", "tiny", "1")
    numbers = run.metrics("tools")[1]
    assert {"rollout/tool_calls", "rollout/tool_errors"} <= set(numbers)
    assert run.number("held-out reward") == f"{numbers['eval/reward']:.3f}"
    sample = json.loads((run.folder / "runs/tools/samples.jsonl").read_text().splitlines()[0])
    assert "Return the day of the week of a date." in sample["prompt"]
    weekday, reward = (load_function(f"{EXAMPLES / 'tools.py'}:{name}") for name in ("weekday", "reward"))
    assert weekday("1969-07-20") == "Sunday"
    answers = ("It was a Sunday.", "Monday", "Sunday or Monday")
    assert [reward({"answer": "Sunday"}, answer) for answer in answers] == [1.0, 0.0, 0.0]


def environment(run: Runner) -> None:
    run("environment.py", "tiny", "1")
    numbers = run.metrics("environment")[1]
    assert 1 <= numbers["rollout/turns"] <= 6
    assert 0 <= numbers["rollout/done"] <= 1
    # A game without the right guess costs 0.1 per turn.
    assert numbers["rollout/reward"] <= -0.1 * numbers["rollout/turns"] + 1.1 * numbers["rollout/done"] + 1e-6
    assert run.number("held-out reward") == f"{numbers['eval/reward']:.3f}"


def own_loop(run: Runner) -> None:
    rewards = re.findall(r"^step \d: reward (\S+), loss \S+$", run("own_loop.py", "tiny", "3"), re.MULTILINE)
    assert len(rewards) == 3
    assert all(0 <= float(reward) < 1 for reward in rewards)


def ray_actors(run: Runner) -> None:
    pytest.importorskip("ray")
    printed = run("ray_actors.py", "tiny", "--kill")
    steps = re.findall(r"^step (\d): loss (\S+)$", printed, re.MULTILINE)
    assert [step for step, _ in steps] == ["1", "2", "3", "3", "4", "5", "6"]
    assert re.search(r"rank 1 \(pid.* died", printed)
    assert steps[2] == steps[3]


SCRIPTS: dict[str, Callable[[Runner], None]] = {
    "environment.py": environment,
    "grpo.py": grpo,
    "own_loop.py": own_loop,
    "preferences.py": preferences,
    "ray_actors.py": ray_actors,
    "sft.py": sft,
    "tools.py": tools,
    "training_step.py": training_step,
}
"""A function that runs each script, and checks what it promises."""


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    write_chat_model(tmp_path / "tiny")
    return Runner(tmp_path)


def examples() -> dict[str, str]:
    """Return the text of each example, by its name in the folder."""
    return {path.relative_to(EXAMPLES).as_posix(): path.read_text() for path in EXAMPLES.rglob("*.py")}


def test_every_example_is_run() -> None:
    """Those in ``tinker`` are run by ``make test-cookbook``."""
    assert {name for name in examples() if not name.startswith("tinker/")} == set(SCRIPTS)


def test_every_example_has_fewer_than_60_lines() -> None:
    lines = {name: len(text.splitlines()) for name, text in examples().items()}
    assert {name: count for name, count in lines.items() if count >= LINES} == {}


def test_every_example_shows_its_command() -> None:
    for name in SCRIPTS:
        assert re.search(rf"^    (python|torchrun .*) examples/{name} ", examples()[name], re.MULTILINE), name


@needs_own_world
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs(name: str, run: Runner) -> None:
    SCRIPTS[name](run)


@needs_own_world
@pytest.mark.parametrize("layout", ["fsdp:d2", "fsdp:c2", "megatron:t2", "jax:d1"])
def test_script_runs_on_every_layout_with_the_same_losses(layout: str, run: Runner) -> None:
    pytest.importorskip({"fsdp": "torch", "megatron": "megatron.core", "jax": "jax"}[layout.partition(":")[0]])
    expected = run("training_step.py", "fsdp:d1", "tiny").splitlines()
    printed = run("training_step.py", layout, "tiny", ranks=int(layout[-1])).splitlines()
    losses = [[float(re.findall(r"loss ([\d.]+)", line)[0]) for line in lines] for lines in (printed, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
