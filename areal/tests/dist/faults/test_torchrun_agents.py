"""torchrun with an agent on each of two nodes, which are processes of this machine. One is lost during a run."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from areal.tests.dist.trainer.grpo_program import STEPS
from areal.tests.grid.models import model_dir
from areal.tests.harness.processes import needs_own_world

pytestmark = [needs_own_world, pytest.mark.timeout(580)]

LOST_IN = 3
"""The step in which an agent is lost, from 1."""

SECONDS_TO_END = 60.0
"""Limit for an agent whose peer is lost. The ranks take a few seconds of it, and torchrun the rest."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment of the agents. With a shared store, torch 2.13 does not tell the address of rank 0 to an agent that joins later."""

Curve = dict[int, list[float]]


def free_port() -> int:
    """Return a port below those that the system gives out, so that no other program gets it before torchrun listens."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(20000, max(20001, first))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Nodes:
    """Agents of torchrun that meet at a port, each with one process.

    Args:
        folder: directory of the run, with the output of the agents.
        restarts: number of times that an agent starts its processes again.
    """

    def __init__(self, folder: Path, restarts: int = 0) -> None:
        self._folder, self._restarts, self._port = folder, restarts, free_port()
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start an agent. The first one opens the store of the rendezvous.

        Args:
            arguments: further arguments of the program on this node.
        """
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=run"]
        command += [f"--max-restarts={self._restarts}", "--local-addr=127.0.0.1"]
        command += ["-m", "areal.tests.dist.trainer.grpo_program", model_dir("qwen3"), str(self._folder), *arguments]
        with open(self._folder / f"agent-{self._port}-{len(self._agents)}", "wb") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
        self._agents.append(agent)
        limit = time.monotonic() + 60
        while len(self._agents) == 1 and not self._listens():
            assert time.monotonic() < limit, "the first agent does not listen"
            time.sleep(0.1)
        return agent

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    def output(self) -> str:
        """Return the ends of what the agents printed."""
        return "\n".join(file.read_text(errors="replace")[-4000:] for file in sorted(self._folder.glob("agent-*")))

    def close(self) -> None:
        for agent in self._agents:
            kill(agent)


@contextmanager
def nodes(folder: Path, restarts: int = 0) -> Iterator[Nodes]:
    with ExitStack() as stack:
        made = Nodes(folder, restarts)
        stack.callback(made.close)
        yield made


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent with its processes, as if the node were lost."""
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(agent.pid)
        for process in (tree, *tree.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    agent.wait()


def wait_for(file: Path, of: Nodes, seconds: float = 200.0) -> None:
    limit = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < limit, of.output()
        time.sleep(0.05)


def curve(folder: Path) -> Curve:
    """Return the numbers of each step. Steps that were taken twice must have the same numbers."""
    steps: Curve = {}
    for step, numbers in map(json.loads, (folder / "curve").read_text().splitlines()):
        assert steps.setdefault(step, numbers) == numbers, f"step {step} was taken again, with other numbers"
    return steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Return the curve of a run of two processes on one node, without a loss."""
    folder = tmp_path_factory.mktemp("whole")
    program = ["--standalone", "--nproc-per-node=2", "-m", "areal.tests.dist.trainer.grpo_program"]
    command = [sys.executable, "-m", "torch.distributed.run", *program, model_dir("qwen3"), str(folder)]
    subprocess.run(command, check=True, timeout=280, env=ENVIRONMENT)
    steps = curve(folder)
    assert len(steps) == STEPS
    return steps


def test_both_agents_are_started_again(whole: Curve, tmp_path: Path) -> None:
    """The agent with the store of the rendezvous is lost. The other one ends, and the run resumes to the same curve."""
    with nodes(tmp_path) as first:
        lost = first.start(str(LOST_IN))
        other = first.start()
        wait_for(tmp_path / "stalled", first)
        ranks = psutil.Process(other.pid).children(recursive=True)
        begin = time.monotonic()
        kill(lost)
        assert other.wait(SECONDS_TO_END) != 0
        assert not psutil.wait_procs(ranks, timeout=10)[1]
        print(f"the other agent and its ranks ended after {time.monotonic() - begin:.1f} s")
    assert sorted(curve(tmp_path)) == list(range(1, LOST_IN))
    with nodes(tmp_path) as second:
        agents = [second.start(), second.start()]
        assert [agent.wait(280) for agent in agents] == [0, 0], second.output()
    assert curve(tmp_path) == whole


def test_agent_that_is_left_waits_for_another(whole: Curve, tmp_path: Path) -> None:
    """With ``--max-restarts``, the agent with the store starts its processes again as soon as another agent has joined."""
    with nodes(tmp_path, restarts=2) as them:
        other = them.start()
        lost = them.start(str(LOST_IN))
        wait_for(tmp_path / "stalled", them)
        begin = time.monotonic()
        kill(lost)
        joined = them.start()
        assert [agent.wait(280) for agent in (other, joined)] == [0, 0], them.output()
        print(f"the run was complete {time.monotonic() - begin:.1f} s after the loss")
        assert "RankLostError" in them.output()
    assert curve(tmp_path) == whole
