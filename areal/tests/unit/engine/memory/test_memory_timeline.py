"""Memory over time, computed from the events of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal.utils.profiling.profiler import BETWEEN, MemoryTimeline


def memory(ts: float, change: int, device: int = 0) -> dict[str, Any]:
    return {"name": "[memory]", "ts": ts, "args": {"Bytes": change, "Device Type": device}}


def phase(ts: float, end: float, name: str, kind: str = "user_annotation") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": end - ts, "cat": kind}


EVENTS = [
    memory(30e6, 100),
    memory(20e6, 10),
    memory(20e6, 7, device=1),
    memory(31e6, -60),
    memory(50e6, -20),
    phase(12e6, 60e6, "forwarded by someone else"),
    phase(10e6, 40e6, "schedule"),
    phase(15e6, 25e6, "forward mb 0"),
    phase(29e6, 30.5e6, "reduce"),
    phase(26e6, 35e6, "backward mb 0"),
    phase(19e6, 32e6, "optimizer", kind="gpu_user_annotation"),
    {"name": "process_name", "ph": "M"},
]


def test_timeline_points_have_allocated_bytes_and_innermost_phase() -> None:
    timeline = MemoryTimeline.of_trace(EVENTS, start_bytes=1000)
    assert timeline.points == [
        (10.0, 1010, "forward mb 0"),
        (20.0, 1110, "reduce"),
        (21.0, 1050, "backward mb 0"),
        (40.0, 1030, BETWEEN),
    ]
    assert timeline.peak == (20.0, 1110, "reduce")


def test_the_file_has_all_points(tmp_path: Path) -> None:
    for timeline in (MemoryTimeline.of_trace(EVENTS), MemoryTimeline.of_trace([])):
        timeline.write(tmp_path / "memory.json")
        content = json.loads((tmp_path / "memory.json").read_text())
        assert [tuple(point) for point in content["points"]] == timeline.points
        assert content["peak"]["bytes"] == timeline.peak[1]
