"""Phase timer: phases add up to the time of a call. On a GPU there is one synchronization, at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.utils import platform
from areal.utils.profiling.phase_timer import PhaseTimer


class Ticks:
    """Stopwatch that a test advances by hand."""

    now = 0.0

    def fail_after(self, seconds: float) -> None:
        self.now += seconds
        raise ValueError("mine")

    def mark(self) -> float:
        return self.now

    def laps(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr(platform, "stopwatch", lambda device: ticks)
    return ticks


def test_nested_phase_time_counts_only_for_the_innermost(ticks: Ticks) -> None:
    """Time in a nested phase counts only for the innermost phase."""
    timer = PhaseTimer(torch.device("cpu"))
    with timer.call() as call:
        ticks.now += 1
        with timer.phase("backward"):
            ticks.now += 2
            with timer.phase("forward", 0):
                ticks.now += 4
            ticks.now += 8
            with timer.phase("reduce"):
                ticks.now += 16
        ticks.now += 32
        with timer.phase("optimizer"):
            ticks.now += 64
        _, timings = call.read()
    assert timings == {"data": 33, "forward": 4, "backward": 10, "reduce": 16, "optimizer": 64}
    assert sum(timings.values()) == ticks.now
    assert list(timings) == ["data", "forward", "backward", "reduce", "optimizer"]


def test_nested_call_is_counted_in_the_outer_call(ticks: Ticks) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with timer.call() as outer:
        with timer.call() as inner, timer.phase("forward"):
            ticks.now += 1
            seconds, timings = inner.read()
            assert seconds >= 0
            assert timings == {}
        ticks.now += 2
        assert outer.read()[1] == {"data": 2, "forward": 1}


def test_error_closes_phases_and_call(ticks: Ticks) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with pytest.raises(ValueError, match="mine"), timer.call(), timer.phase("backward"), timer.phase("reduce"):
        raise ValueError("mine")
    with timer.call() as call:
        with pytest.raises(ValueError, match="mine"), timer.phase("forward"):
            ticks.fail_after(1)
        ticks.now += 2
        assert call.read()[1] == {"data": 2, "forward": 1}


def test_phases_outside_of_a_call_are_ignored(ticks: Ticks) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with timer.phase("forward"):
        ticks.now += 1
    with timer.call() as call:
        assert call.read()[1] == {"data": 0}


def test_cpu_phases_use_host_time() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    best = 1.0
    for _ in range(3):  # another process may be scheduled between two lines
        with timer.call() as call:
            for mb in range(20):
                with timer.phase("forward", mb):
                    torch.ones(1_000_000).sum()
            seconds, timings = call.read()
        best = min(best, abs(sum(timings.values()) / seconds - 1))
    assert best < 0.02


# ---- a GPU, simulated


class Device:
    """Fake ``torch.cuda`` whose events are one second apart. Records each synchronization."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.stream = "computing"
        self.Event = self._make

    def current_stream(self, device: torch.device) -> str:
        return self.stream

    def _make(self, *, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace()

        def record(stream: str) -> None:
            event.at = 1000.0 * sum(kind == "record" for kind, _ in self.log)
            self.log.append(("record", stream))

        event.record = record
        event.synchronize = lambda: self.log.append(("synchronize", None))
        event.elapsed_time = lambda other: other.at - event.at
        return event


def test_gpu_phases_synchronize_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch, "cuda", device)
    timer = PhaseTimer(torch.device("cuda", 0))
    with timer.call() as call:
        with timer.phase("backward"):
            # FSDP reduces on a separate stream: only the time that the compute stream waits is counted
            device.stream = "reducing"
            with timer.phase("reduce"):
                pass
        assert [kind for kind, _ in device.log] == ["record"] * 5
        seconds, timings = call.read()
    assert timings == {"data": 2.0, "backward": 2.0, "reduce": 1.0}
    assert seconds < 5  # of the host: the events say 5 s
    assert device.log[:-1] == [("record", "computing")] * 6
    assert device.log[-1] == ("synchronize", None)
