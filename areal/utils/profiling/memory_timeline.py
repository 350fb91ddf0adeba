"""How many bytes tensors held over the time of a profile, and in which phase."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from areal.utils.profiling.phase_timer import PHASES

BETWEEN = "between calls"
"""The phase where no call is under way."""

_COLOURS = dict(
    zip(
        (*PHASES, "schedule", BETWEEN),
        ("#888", "#4e79a7", "#f28e2b", "#e15759", "#59a14f", "#bbb", "#ddd"),
        strict=True,
    )
)
_WIDTH, _HEIGHT = 1200, 400


@dataclass(frozen=True)
class MemoryTimeline:
    """A point wherever something was allocated or freed.

    Attributes:
        points: (seconds since the first range or point, bytes, phase as the trace names it, such as ``forward mb 0``), by time.
        start_bytes: what was held when the profile began; where that is not known, 0, and bytes are relative to it.
    """

    points: Sequence[tuple[float, int, str]]
    start_bytes: int = 0

    @classmethod
    def of_trace(
        cls, events: Iterable[Mapping[str, Any]], device_type: int = 0, start_bytes: int = 0
    ) -> MemoryTimeline:
        """From the events of a chrome trace with memory.

        Args:
            device_type: whose memory, by the number that the trace has for it.
        """
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
        points, held, open_ranges, following = [], start_bytes, list[tuple[float, str]](), 0
        for ts, change in memory:
            while following < len(ranges) and ranges[following][0] <= ts:
                open_ranges.append(ranges[following][1:])
                following += 1
            open_ranges = [span for span in open_ranges if span[0] >= ts]
            held += change
            points.append(((ts - begin) / 1e6, held, open_ranges[-1][1] if open_ranges else BETWEEN))
        return cls(points, start_bytes)

    @property
    def peak(self) -> tuple[float, int, str]:
        """The point with the most bytes; the start, where nothing was allocated."""
        return max(self.points, key=lambda point: point[1], default=(0.0, self.start_bytes, BETWEEN))

    def write(self, path: Path) -> None:
        """As JSON: ``start_bytes``, ``peak`` and ``points``, whose ``columns`` are named."""
        columns = ("seconds", "bytes", "phase")
        content = {
            "start_bytes": self.start_bytes,
            "peak": dict(zip(columns, self.peak, strict=True)),
            "columns": columns,
            "points": self.points,
        }
        path.write_text(json.dumps(content) + "\n")

    def draw(self, path: Path) -> None:
        """As SVG: the most bytes of each column of pixels, in the colour of their phase, above the least of all."""
        last = self.points[-1][0] if self.points else 0.0
        low = min((held for _, held, _ in self.points), default=0)
        span, rise = max(last, 1e-9), max(self.peak[1] - low, 1)
        columns: dict[int, tuple[float, int, str]] = {}
        for point in self.points:
            x = min(int(point[0] / span * _WIDTH), _WIDTH - 1)
            if x not in columns or point[1] > columns[x][1]:
                columns[x] = point
        bars = []
        for x, end in pairwise([*sorted(columns), _WIDTH]):
            _, held, phase = columns[x]
            height = (held - low) / rise * _HEIGHT
            colour = _COLOURS[phase if phase == BETWEEN else phase.split(" ")[0]]
            bars.append(
                f'<rect x="{x}" y="{30 + _HEIGHT - height:.1f}" width="{end - x}" height="{height:.1f}" fill="{colour}"/>'
            )
        legend = "".join(
            f'<text x="{10 + 150 * i}" y="{_HEIGHT + 50}" fill="{colour}">{phase}</text>'
            for i, (phase, colour) in enumerate(_COLOURS.items())
        )
        seconds, most, phase = self.peak
        title = (
            f"peak {most / 2**20:.1f} MiB in {phase} at {seconds:.3f} s of {last:.3f} s; bottom {low / 2**20:.1f} MiB"
        )
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT + 60}" font-family="sans-serif" font-size="14">'
            f'<text x="10" y="20">{title}</text>{"".join(bars)}{legend}</svg>\n'
        )
