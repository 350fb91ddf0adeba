"""Profiles of an engine: torch's trace with the phases of each call, and a memory timeline."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from areal.utils import platform
from areal.utils.profiling.memory_timeline import MemoryTimeline
from areal.utils.profiling.phase_timer import PhaseTimer


@contextlib.contextmanager
def profiled(
    timer: PhaseTimer, device: torch.device, rank: int, folder: str | Path, *, memory: bool, stacks: bool
) -> Iterator[dict[int, Path]]:
    """Profile everything inside. See :meth:`areal.api.engine.TrainEngine.profile`. Not collective.

    Args:
        timer: timer of the engine, whose phases become ranges in the trace.
        rank: int. Number in the names of the files.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("profile() where a profiler is on already: leave that one first, there is one in a process")
    folder = Path(folder).absolute()
    _check_writable(folder)
    device_type, start_bytes = platform.profiled_memory(device)
    profiler = torch.profiler.profile(
        activities=platform.profiler_activities(device), profile_memory=memory, with_stack=stacks
    )
    if memory:
        platform.start_memory_history(device)
    profiler.start()
    try:
        with timer.shown():
            yield {rank: folder}
    finally:
        # Also after an error, whose cause may be in the profile.
        profiler.stop()
        trace = folder / f"trace-rank{rank}.json.gz"
        profiler.export_chrome_trace(str(trace))
        if memory:
            platform.save_memory_history(device, folder / f"memory-rank{rank}.pickle")
            with gzip.open(trace, "rt") as file:
                events = json.load(file)["traceEvents"]
            timeline = MemoryTimeline.of_trace(events, device_type, start_bytes)
            timeline.write(folder / f"memory-rank{rank}.json")


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"folder = {str(folder)!r}: no profile can be written there ({error}): choose another folder"
        ) from error
