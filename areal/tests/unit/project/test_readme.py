"""The programs of the README run as they are pasted, in an empty folder, and print the same numbers on every layout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import areal
from areal.tests.harness.processes import needs_own_world
from areal.tests.tinker.sdk.server import KEY, Sdk, ServerProcess
from areal.tests.unit.chat.chat_models import write_chat_model
from areal.trainer.trackers import read_metrics

ROOT = Path(areal.__file__).parents[1]
BLOCK = re.compile(r"^```python( \w+)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {name.strip(): code for name, code in BLOCK.findall((ROOT / "README.md").read_text())}
RECIPE = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ALONE = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def run(folder: Path, code: str, *launcher: str, **variables: str) -> list[list[float]]:
    """Run a program in a folder. Returns the numbers of each line that it prints."""
    (folder / "engine.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name not in ALONE}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *launcher, "engine.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


def assert_same(lines: list[list[float]], expected: list[list[float]]) -> None:
    assert len(lines) == len(expected) == 10
    assert expected[-1][0] < expected[0][0] - 0.5, "nothing is learned"
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4)


@needs_own_world
def test_engine_prints_the_same_under_torchrun(tmp_path: Path) -> None:
    expected = run(tmp_path, PROGRAMS[""])
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert_same(run(tmp_path, PROGRAMS[""].replace("fsdp:d1", "fsdp:t2"), *launcher), expected)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_same_loop_on_ray_actors_prints_the_same(tmp_path: Path) -> None:
    lines = run(tmp_path, PROGRAMS[""] + PROGRAMS["ray"], RAY_AUTH_MODE="disabled", RAY_worker_niceness="0")
    assert_same(lines[10:], lines[:10])


def test_client_by_the_sdk_trains_on_the_server(tmp_path: Path) -> None:
    python = Sdk("0.38.0").python
    run(tmp_path, PROGRAMS[""])
    server = ServerProcess(tmp_path / "server", str(tmp_path / "tiny"))
    try:
        code = PROGRAMS["tinker"].replace("http://127.0.0.1:8000", server.url).replace("tml-local", KEY)
        (tmp_path / "client.py").write_text(code)
        done = subprocess.run(
            [python, "client.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        losses = [float(line) for line in done.stdout.splitlines()]
        assert len(losses) == 10
        assert losses[-1] < 0.8 * losses[0]
    finally:
        server.stop()


def test_run_in_ten_lines_prints_a_reward(tmp_path: Path) -> None:
    (code,) = RECIPE.findall((ROOT / "README.md").read_text())
    lines = [line for line in code.splitlines() if line]
    assert len(lines) <= 10
    model, _ = write_chat_model(tmp_path)
    small = code.replace("Qwen/Qwen2.5-0.5B-Instruct", model).replace(
        "steps=50", "steps=1, groups=2, trackers=['jsonl']"
    )
    assert run(tmp_path, small) == [[0.0]]
    assert set(read_metrics(tmp_path / "runs" / "grpo" / "metrics.jsonl")) == {0, 1}
