"""Runs whose answers come from servers: those that run, and those that the run starts and stops."""

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from areal.recipes import grpo
from areal.recipes.generation.started_server import StartedServer
from areal.tests.dist.recipes.policy_runs import SMALL, curve
from areal.tests.harness import tiny
from areal.tests.harness.recipes.recipe_data import recipe_model, recipe_model_with_experts, reward, rows

COMMAND = f"{sys.executable} -m areal.tests.harness.recipes.stand_in_server"


def run(output: Path, **changes: Any) -> Any:
    settings = {"model": recipe_model(), **SMALL, "groups": 2, "eval_every": 2, **changes}
    return grpo(settings.pop("model"), rows(8), reward, evaluation=rows(4, 1), output=output, **settings)


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d2"))
def test_run_with_a_server_of_its_own(backend: str, tmp_path: Path) -> None:
    made = run(tmp_path, backend=backend, start_server=COMMAND).build()
    url = made.rollout._fleet.servers[0].url if made.speaks else ""
    made.train()
    got = curve(tmp_path, ("rollout/logprob_error", "rollout/reward", "eval/reward"))
    assert len(got["rollout/reward"]) == 3
    assert len(got["eval/reward"]) == 3
    assert max(got["rollout/logprob_error"]) < 1e-5
    assert not made.speaks or is_closed(url)


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_run_with_a_server_that_runs(backend: str, tmp_path: Path) -> None:
    with StartedServer(COMMAND, recipe_model(), "vllm", tmp_path / "log") as server:
        run(tmp_path / "run", backend=backend, servers=[server.url]).train()
        assert not is_closed(server.url)
    assert len(curve(tmp_path / "run", ("rollout/reward",))["rollout/reward"]) == 3


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1", "fsdp:d2", "megatron:d1", "jax:d1"))
def test_experts_of_the_servers_are_replayed(backend: str, tmp_path: Path) -> None:
    """The servers send tokens to experts that the trainer's routers do not choose."""
    shifting = {"backend": backend, "model": recipe_model_with_experts(), "start_server": f"{COMMAND} --shift-experts"}
    run(tmp_path, **shifting, routing_replay=True, steps=2).train()
    names = ("rollout/logprob_error", "rollout/logprob_error_without_replay")
    replayed, without = (max(its) for its in curve(tmp_path, names).values())
    assert replayed < 1e-5, "the trainer computes what the servers did"
    assert without > 1e-3, "its routers choose others"


def test_replay_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for why, changes in {
        "has no experts": {"start_server": COMMAND},
        "a replica in this process returns no experts": {"model": recipe_model_with_experts()},
    }.items():
        with pytest.raises(ValueError, match=f"routing_replay = True.*{why}"):
            run(tmp_path, routing_replay=True, **changes).build()


@pytest.mark.parametrize(("invariant", "value"), [(True, "1"), (False, "")])
def test_server_starts_in_its_mode_of_batch_invariance(invariant: bool, value: str, tmp_path: Path) -> None:
    command = "sh -c 'echo mode=$VLLM_BATCH_INVARIANT;'"
    server = StartedServer(command, "a model", "vllm", tmp_path / "log", batch_invariant=invariant)
    with pytest.raises(ValueError, match=f"mode={value}\n"), server:
        pass


@pytest.mark.world(1, timeout=600)  # six runs
def test_three_seeds_learn_on_servers_as_they_do_on_a_replica(tmp_path: Path) -> None:
    """Server and replica sample other answers; the means over seeds differ by less than three standard errors."""
    settings = {"steps": 6, "groups": 6, "group_size": 6, "lr": 1e-2, "eval_every": None, "eval_samples": 8}
    rewards: dict[str, list[list[float]]] = {"replica": [], "servers": []}
    for where, its in {"replica": {}, "servers": {"start_server": COMMAND}}.items():
        for seed in range(3):
            output = tmp_path / f"{where}-{seed}"
            run(output, backend="fsdp:d1", seed=seed, **settings, **its).train()
            rewards[where].append(curve(output, ("eval/reward",))["eval/reward"])
    after = {where: [last for _, last in each] for where, each in rewards.items()}
    assert all(last > first + 0.1 for each in rewards.values() for first, last in each), rewards
    error = (sum(statistics.variance(each) / 3 for each in after.values())) ** 0.5
    assert abs(statistics.fmean(after["replica"]) - statistics.fmean(after["servers"])) < max(3 * error, 0.1), rewards


def is_closed(url: str) -> bool:
    """Return whether nothing listens, at latest after some seconds."""
    import socket

    port = int(url.rpartition(":")[2])
    for _ in range(150):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d2"))
def test_server_that_does_not_start_is_an_error_on_all_ranks(backend: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"start_server: .* ended; the end of .*server\.log:\nno memory for a cache"):
        run(tmp_path, backend=backend, start_server=f"{COMMAND} --break").build()


KILLED = """
import sys, time
from pathlib import Path
from areal.recipes.generation.started_server import StartedServer
command, model, log = sys.argv[1:]
with StartedServer(command, model, "vllm", Path(log)) as server:
    print(server.url, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_server_ends_with_a_run_whose_processes_are_ended(backend: str, number: str, tmp_path: Path) -> None:
    """As torchrun, ``timeout`` and a terminal do: the signal goes to all processes of the group."""
    command = [sys.executable, "-c", KILLED, COMMAND, recipe_model(), str(tmp_path / "log")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    os.killpg(process.pid, signal.Signals[number])
    process.wait()
    assert is_closed(url)


@pytest.mark.parametrize("backend", tiny.chosen("fsdp:d1"))
def test_server_is_found_beside_a_proxy_for_downloads(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with StartedServer(COMMAND, recipe_model(), "vllm", tmp_path / "log", start_seconds=60.0) as server:
        assert server.url.startswith("http://127.0.0.1:")
