"""The bytes of all tensors over the time of a profile, with the phase of each change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.utils.profiling.phase_timer import PHASES

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
