"""The example of a Ray job runs by one command, and goes on after the loss of a process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal.tests.harness.recipes.character_tokenizer import EXAMPLES, character_tokenizer

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.skipif(find_spec("opencensus") is None, reason="job submission needs ray[default]"),
    pytest.mark.skipif(find_spec("matplotlib") is None, reason="the example needs the extra demo"),
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the directory of a tiny model with a tokenizer."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_job_goes_on_after_the_loss_of_a_process(
    head: tuple[psutil.Process, dict[str, str]], model: Path, tmp_path: Path
) -> None:
    cluster, environment = head
    log, output = tmp_path / "log", tmp_path / "output"
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", str(EXAMPLES)]
    submit += ["--runtime-env-json", json.dumps({"py_modules": [str(EXAMPLES.parent / "areal")]}), "--"]
    submit += ["python", "ray/grpo_job.py", "--model", str(model), "--output", str(output), "--backend", "fsdp:d2"]
    submit += f"--dtype float32 --plain --steps {STEPS} --groups 4 --group-size 4 --eval-size 8".split()
    submit += ["--system", "", "--warmup-steps", "1", "--warmup-batch-size", "8", "--kl-coef", "0.01"]

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
    assert "lost: rank" in text
    assert "going on after step" in text
    results = json.loads((output / "curves.json").read_text())
    for name in ("rollout/reward", "actor/loss", "actor/grad_norm"):
        assert len(results["curves"][name]) == STEPS
        assert all(math.isfinite(value) for value in results["curves"][name]), name
    assert set(results["accuracy"]) == {"0", str(STEPS)}
    assert os.listdir(output / "checkpoints" / "policy") == [f"step-{STEPS:06d}"]
    assert (output / "model" / "model.safetensors").exists()
