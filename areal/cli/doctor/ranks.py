"""Start the processes of both ranks, limit their time, and read their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The file names of areal.cli.doctor.rank_process, which cannot be imported where torch is missing.
_RESULTS, _MODULE = "results.jsonl", "areal.cli.doctor.rank_process"
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a launcher, which belong to the program that called this one."""


@dataclass
class Observed:
    """Reports of both ranks.

    Attributes:
        devices: one line for each device.
        engines: name -> result of :func:`~areal.cli.doctor.rank_process.try_engine`.
        one, two: losses and gradient norms on one rank and on two, as far as they got.
        stage: what rank 0 did last, empty at its end.
        seconds: time until both processes had ended.
        failure: why there is no complete result, or ``None``.
        output: the last lines that the failed process printed.
    """

    devices: list[str] = field(default_factory=list)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    one: list[float] | None = None
    two: list[float] | None = None
    stage: str = "importing torch, transformers and the FSDP engine"
    seconds: float = 0.0
    failure: str | None = None
    output: str = ""


def observe(timeout: float, module: str = _MODULE) -> Observed:
    """Run both processes, and end them after ``timeout`` seconds at the latest.

    Args:
        timeout: limit in seconds.
        module: module that each process runs with its rank and a folder as arguments.
    """
    started = time.monotonic()
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    # The processes see what this one sees, however it was started.
    environment = {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with tempfile.TemporaryDirectory(prefix="areal-doctor-") as name:
        folder = Path(name)
        logs = [folder / f"rank{rank}.log" for rank in range(2)]
        processes = [_start(module, rank, folder, log, environment) for rank, log in enumerate(logs)]
        try:
            late = _wait(processes, started + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        observed = _read(folder / _RESULTS)
        observed.seconds = time.monotonic() - started
        codes = [process.returncode for process in processes]
        failed = next((rank for rank in (1, 0) if codes[rank] not in (0, -9)), 0)
        if late:
            observed.failure = f"no result after {timeout:g} s, while {observed.stage}"
        elif observed.two is None or any(codes):
            observed.failure = f"rank {failed} ended with {_ending(codes[failed])} while {observed.stage}"
        if observed.failure:
            observed.output = _tail(logs[failed])
        return observed


def _start(module: str, rank: int, folder: Path, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until both processes have ended, or one has failed. Returns whether the time was over first."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return False
        if any(codes):
            # The other one has a moment to report what it knows of the failure.
            for process in processes:
                try:
                    process.wait(max(0.0, min(3.0, deadline - time.monotonic())))
                except subprocess.TimeoutExpired:
                    continue
            return False
        time.sleep(0.05)
    return True


def _read(path: Path) -> Observed:
    observed = Observed()
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    for line in lines:
        values = json.loads(line)
        if "engine" in values:
            observed.engines[values.pop("engine")] = values
        for name in ("devices", "one", "two", "stage"):
            if name in values:
                setattr(observed, name, values[name])
    return observed


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _tail(log: Path, lines: int = 6) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
