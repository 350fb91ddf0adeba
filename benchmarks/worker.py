"""Process of one rank of one row. It executes the driver's commands, one line of JSON at a time.

The arguments are its row and task. When ready, it writes ``{"ready": true, "can_forward": ...}``. The responses to ``{"do": "step"}``
and ``{"do": "forward"}`` contain measurements and results; ``{"do": "quit"}`` ends the process. An error is reported as
``{"error": ...}`` and ends it too. With ``"give_back": true`` a turn ends with free memory returned to the system. Other output to
the standard output is redirected to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np
import torch

from areal.utils.profiling import host_memory
from benchmarks.machine import give_back, memory_mb, stay_on_core
from benchmarks.rows import Row, Task, build


def timed(work: Callable[[], Any], before_mb: float) -> tuple[Any, dict[str, float]]:
    """Run ``work``; returns its result, its seconds, and its peak memory in MB, in total and above ``before_mb``."""
    host_memory.reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    taken = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    peak = memory_mb(peak=True)
    return result, {**taken, "peak_mb": peak, "rise_mb": peak - before_mb}


def obey(row: Row, task: Task, command: dict[str, Any], before_mb: float) -> dict[str, Any]:
    """Execute one command."""
    if command["do"] == "step":
        (loss, norm), taken = timed(row.step, before_mb)
        return {**taken, "loss": loss, "grad_norm": norm}
    if command["do"] == "forward":
        logprobs, taken = timed(row.forward, before_mb)
        if command.get("save"):
            trained = zip(logprobs, task.local_workload().trained, strict=True)
            np.save(command["save"], torch.cat([x.float()[mask] for x, mask in trained]).numpy())
        return taken
    raise ValueError(f"do = {command['do']!r}: say step, forward or quit")


def serve(job: dict[str, Any], commands: TextIO, answers: TextIO) -> int:
    """Build the row and execute commands until ``quit``. Returns the exit code."""

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        task = Task(**job["task"])
        row = build(job["module"], task, job["options"])
        before_mb = memory_mb()
        answer({"ready": True, "can_forward": row.can_forward})
        for line in commands:
            command = json.loads(line)
            if command["do"] == "quit":
                break
            reply = obey(row, task, command, before_mb)
            if command["give_back"]:
                give_back()
            answer(reply)
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    stay_on_core(job["task"]["rank"])
    code = serve(job, sys.stdin, answers)
    # Skip interpreter shutdown: libraries leave threads and process groups whose peers have ended.
    sys.stderr.flush()
    os._exit(code)
