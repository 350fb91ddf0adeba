"""A recipe is a Ray job by one command, and goes on after the loss of a process."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import areal
from areal.tests.harness.recipes.recipe_data import rows, save_model
from areal.trainer.trackers import read_metrics

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.skipif(find_spec("opencensus") is None, reason="job submission needs ray[default]"),
]

HEAD = """
import socket, sys
from ray.cluster_utils import Cluster
# Jobs are started by an agent, which has a port of its own also where another cluster runs on this machine.
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
options = {"num_cpus": 4, "object_store_memory": 150 * 2**20, "include_dashboard": True}
cluster = Cluster(initialize_head=True, head_node_args={**options, "dashboard_agent_listen_port": port})
print(cluster.head_node.address_info["webui_url"], flush=True)
sys.stdin.read()
cluster.shutdown()
"""

STEPS = 40
"""Enough for a loss between the first and the last, which take some seconds."""


@pytest.fixture
def head(apart: dict[str, str]) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Start a cluster with the job server. Yields its process, and the environment of commands."""
    path = f"{Path(sys.executable).parent}:{apart['PATH']}"
    environment = {name: value for name, value in apart.items() if name != "PYTHONPATH"} | {"PATH": path}
    program = subprocess.Popen(
        [sys.executable, "-c", HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        # Lines of the cluster's own log may come first.
        url = next(line.strip() for line in program.stdout if line[0].isdigit())
        yield psutil.Process(program.pid), environment | {"RAY_API_SERVER_ADDRESS": f"http://{url}"}
    finally:
        program.stdin.close()
        program.wait(60)


REWARD = """
def reward(row, answer):
    return sum("a" <= character < "n" for character in answer) / max(1, len(answer))
"""
SETTINGS = f"""
dataset = "rows.jsonl"
reward = "task.py:reward"
dtype = "float32"
held_out = 4
steps = {STEPS}
groups = 4
group_size = 4
max_new_tokens = 4
kl_coef = 0.01
checkpoint_every = 1
max_losses = 1
"""


def test_job_goes_on_after_the_loss_of_a_process(head: tuple[psutil.Process, dict[str, str]], tmp_path: Path) -> None:
    cluster, environment = head
    log, output, folder = tmp_path / "log", tmp_path / "output", tmp_path / "job"
    save_model(tmp_path / "model", num_key_value_heads=2, max_position_embeddings=256)
    folder.mkdir()
    for name, text in (
        ("rows.jsonl", "\n".join(map(json.dumps, rows(24)))),
        ("task.py", REWARD),
        ("run.toml", SETTINGS),
    ):
        (folder / name).write_text(text)
    package = str(Path(areal.__file__).parent)
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", str(folder)]
    submit += ["--runtime-env-json", json.dumps({"py_modules": [package]}), "--"]
    submit += ["python", "-m", "areal.cli", "grpo", "run.toml", "--ray", "backend=fsdp:d2"]
    submit += [f"model={tmp_path / 'model'}", f"output={output}"]

    def submitted() -> subprocess.Popen[bytes]:
        with open(log, "wb") as file:
            return subprocess.Popen(submit, stdout=file, stderr=file, env=environment)

    job = submitted()
    try:
        # A rank is killed soon after the first checkpoint, between two steps or in one.
        limit = time.monotonic() + 300
        while not list(output.glob("checkpoints/policy/step-*")):
            # The job server answers before the agent that starts jobs does.
            if job.poll() and "No available agent to submit job" in log.read_text():
                job = submitted()
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.02)
        ranks = [each for each in cluster.children(recursive=True) if "RankProcess" in "".join(each.cmdline())]
        assert len(ranks) == 2
        ranks[-1].kill()
        assert job.wait(250) == 0, log.read_text()
    finally:
        job.kill()

    text = log.read_text()
    assert re.search(r"loss 1 of at most 1: .*rank [01] .*died", text)
    assert "goes on after step" in text
    steps = read_metrics(output / "metrics.jsonl")
    assert sorted(steps) == list(range(STEPS + 1))
    for name in ("rollout/reward", "actor/loss", "actor/grad_norm"):
        assert all(math.isfinite(steps[step][name]) for step in range(1, STEPS + 1)), name
    assert [step for step, its in steps.items() if "eval/reward" in its] == [0, STEPS]
    assert os.listdir(output / "checkpoints" / "policy") == [f"step-{STEPS:06d}"]
    assert (output / "model" / "model.safetensors").exists()
