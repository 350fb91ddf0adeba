"""A row of the benchmark with its processes, one for each rank, from the driver's side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from select import select
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore

from benchmarks.peers.install import interpreter
from benchmarks.rows import RowSpec, Task

ROOT = Path(__file__).parents[1]


@dataclass
class Turn:
    """Measurements of one turn, over all ranks.

    Attributes:
        cpu_seconds: CPU seconds, summed over ranks.
        wall_seconds: wall seconds of the slowest rank.
        peak_mb: largest resident memory of a rank.
        rise_mb: the same, above the resident memory before the rank's first turn.
        loss: loss of a step; NaN for a forward.
        grad_norm: gradient norm of a step; NaN for a forward.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_mb: float
    rise_mb: float
    loss: float = float("nan")
    grad_norm: float = float("nan")


@dataclass
class RowProcesses:
    """A row on a number of ranks. Its processes wait during the turns of other rows.

    Attributes:
        task: task of rank 0; the others differ in ``rank``.
        folder: directory for the standard error of the processes, and for log-probs.
        failure: reason why the row was dropped; empty as long as it runs.
        steps: turns with a step. The first are a warm-up.
        forwards: turns with a forward. The first is a warm-up.
    """

    spec: RowSpec
    task: Task
    folder: Path
    failure: str | None = None
    can_forward: bool = False
    steps: list[Turn] = field(default_factory=list)
    forwards: list[Turn] = field(default_factory=list)
    logprobs: Tensor | None = None
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _store: TCPStore | None = None

    @property
    def label(self) -> str:
        """Name in the table."""
        return self.spec.label(self.task.ranks)

    @property
    def slug(self) -> str:
        """Name in file names."""
        words = "".join(c if c.isalnum() else " " for c in self.label).split()
        return "-".join([*words, str(self.task.ranks)])

    def start(self) -> None:
        """Start the processes; does not wait for them."""
        python = str(interpreter(self.spec.peer)) if self.spec.peer else sys.executable
        if not Path(python).exists():
            self.failure = f"there is no {python}: run `python -m benchmarks.peers.install {self.spec.peer}`"
            return
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        if self.task.ranks > 1:
            # The ranks connect to a store that is already open, so that no other process can take its port.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "WORLD_SIZE": str(self.task.ranks),
            }
        for rank in range(self.task.ranks):
            task = asdict(replace(self.task, rank=rank))
            job = {"module": self.spec.module, "options": self.spec.options, "task": task}
            if self.task.ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with self._log(rank).open("w") as errors:
                self._processes.append(
                    subprocess.Popen(
                        [python, "-m", "benchmarks.worker", json.dumps(job)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=environment,
                        text=True,
                    )
                )

    def wait(self) -> None:
        """Wait until the row is ready or dropped."""
        if self.failure is None:
            answers = self._hear()
            self.can_forward = bool(answers) and all(answer["can_forward"] for answer in answers)

    def step(self, *, give_back: bool) -> None:
        """Run an optimizer step, and optionally return free memory to the system afterwards."""
        self._turn(self.steps, [{"do": "step", "give_back": give_back}] * self.task.ranks)

    def forward(self, *, give_back: bool, save: bool = False) -> None:
        """Compute log-probs; with ``save``, store them in ``logprobs``: ``[trained_tokens]``, in the order of the workload."""
        if not self.can_forward:
            return
        files = [str(self.folder / f"{self.slug}-{rank}.npy") for rank in range(self.task.ranks)]
        commands = [{"do": "forward", "give_back": give_back, "save": file if save else None} for file in files]
        self._turn(self.forwards, commands)
        if save and self.failure is None:
            self.logprobs = self._gather(files)

    def quit(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes, self._store = [], None

    def _gather(self, files: list[str]) -> Tensor:
        full = self.task.everything()
        out: dict[int, Tensor] = {}
        for rank, file in enumerate(files):
            numbers = full.shard_indices(rank, self.task.ranks)
            sizes = [int(full.trained[i].sum()) for i in numbers]
            out.update(zip(numbers, torch.from_numpy(np.load(file)).split(sizes), strict=True))
            Path(file).unlink()
        return torch.cat([out[i] for i in range(len(out))])

    def _turn(self, turns: list[Turn], commands: list[dict[str, Any]]) -> None:
        if self.failure is not None:
            return
        for process, command in zip(self._processes, commands, strict=True):
            with suppress(BrokenPipeError):  # the cause of death is read below
                pipe = cast(IO[str], process.stdin)
                pipe.write(json.dumps(command) + "\n")
                pipe.flush()
        answers = self._hear()
        if answers:
            turn = Turn(
                cpu_seconds=sum(answer["cpu_seconds"] for answer in answers),
                wall_seconds=max(answer["wall_seconds"] for answer in answers),
                peak_mb=max(answer["peak_mb"] for answer in answers),
                rise_mb=max(answer["rise_mb"] for answer in answers),
            )
            if "loss" in answers[0]:
                turn.loss, turn.grad_norm = answers[0]["loss"], answers[0]["grad_norm"]
            turns.append(turn)

    def _hear(self) -> list[dict[str, Any]]:
        """Receive one response of each rank; empty if a rank failed, which drops the row."""
        answers: dict[int, dict[str, Any]] = {}
        pipes = {cast(IO[str], process.stdout): rank for rank, process in enumerate(self._processes)}
        while pipes:
            # Read whichever rank responds first: a rank may wait forever for one that has failed.
            for pipe in select(list(pipes), [], [])[0]:
                rank, line = pipes.pop(pipe), pipe.readline()
                answers[rank] = json.loads(line) if line else {"error": "the process died without a word"}
                if "error" in answers[rank]:
                    self.failure = f"rank {rank}: {answers[rank]['error']} (see {self._log(rank)})"
                    self.quit()
                    return []
        return [answers[rank] for rank in sorted(answers)]

    def _log(self, rank: int) -> Path:
        return self.folder / f"{self.slug}-{rank}.log"
