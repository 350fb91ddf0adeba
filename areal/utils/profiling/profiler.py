"""Profiles of an engine: torch's trace with the phases of each call, and a memory timeline."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal.utils import platform
from areal.utils.profiling.phase_timer import PHASES, PhaseTimer


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


BETWEEN = "between calls"
"""Name of the phase outside of calls."""


@dataclass(frozen=True)
class MemoryTimeline:
    """Allocated bytes over time, with a point for each allocation and each release.

    Attributes:
        points: (seconds, bytes, phase) by time. Seconds count from the first range or point; the phase is named as in the trace, such as
            ``forward mb 0``.
        start_bytes: bytes at the start of the profile. 0 if they are not known: bytes are then relative to the start.
    """

    points: Sequence[tuple[float, int, str]]
    start_bytes: int = 0

    @classmethod
    def of_trace(
        cls, events: Iterable[Mapping[str, Any]], device_type: int = 0, start_bytes: int = 0
    ) -> MemoryTimeline:
        """Build a timeline from the events of a chrome trace with memory.

        Args:
            device_type: int. Type of the device in the trace.
            start_bytes: see :class:`MemoryTimeline`.
        """
        # Changes of memory, and the ranges of phases, by time.
        memory, ranges = [], []
        for event in events:
            name = event.get("name", "")
            if name == "[memory]" and event["args"].get("Device Type") == device_type:
                memory.append((float(event["ts"]), int(event["args"]["Bytes"])))
            elif event.get("cat") == "user_annotation" and name.split(" ")[0] in (*PHASES, "schedule"):
                ranges.append((float(event["ts"]), float(event["ts"]) + float(event["dur"]), name))
        memory.sort(key=lambda point: point[0])
        ranges.sort(key=lambda span: (span[0], -span[1]))
        begin = min([ts for ts, *_ in (*memory[:1], *ranges[:1])], default=0.0)
        # The phase of a change is the innermost range that is open then. Ranges are sorted by start, outer ranges first.
        points, nbytes, open_ranges, following = [], start_bytes, list[tuple[float, str]](), 0
        for ts, change in memory:
            while following < len(ranges) and ranges[following][0] <= ts:
                open_ranges.append(ranges[following][1:])
                following += 1
            open_ranges = [span for span in open_ranges if span[0] >= ts]
            nbytes += change
            points.append(((ts - begin) / 1e6, nbytes, open_ranges[-1][1] if open_ranges else BETWEEN))
        return cls(points, start_bytes)

    @property
    def peak(self) -> tuple[float, int, str]:
        """Return the point with the most bytes; the start if there are no points."""
        return max(self.points, key=lambda point: point[1], default=(0.0, self.start_bytes, BETWEEN))

    def write(self, path: Path) -> None:
        """Write a JSON file with ``start_bytes``, ``peak``, ``points`` and the names of their ``columns``."""
        columns = ("seconds", "bytes", "phase")
        content = {
            "start_bytes": self.start_bytes,
            "peak": dict(zip(columns, self.peak, strict=True)),
            "columns": columns,
            "points": self.points,
        }
        path.write_text(json.dumps(content) + "\n")
