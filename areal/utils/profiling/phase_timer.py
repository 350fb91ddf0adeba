"""Times the phases of a call. Their seconds add up to the wall time of the call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import record_function

from areal.api.microbatch import MicroBatch
from areal.utils import platform

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "compile")
"""Phases of a call. ``data`` is the time outside of the others."""


class PhaseTimer:
    """Records when phases begin and end, on this rank. Each engine has one timer.

    At every moment of a call exactly one phase is active: the innermost one. A mark is taken at each change. On a CPU a mark is the time. On a
    GPU it is an event in the compute stream, so that the host does not wait for the device before :meth:`TimedCall.read`.

    Args:
        device: device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = PHASES[0]
        self._call: TimedCall | None = None
        self._shown = False  # a profiler is on
        self._data: AbstractContextManager[object] | None = None  # the profiler's range of ``data``, while it is open

    @contextlib.contextmanager
    def call(self) -> Iterator[TimedCall]:
        """Time the call inside, which begins in the phase ``data``. A call within another call belongs to the phases of that call."""
        if self._call is not None:
            yield TimedCall(None)
            return
        self._call, self._phase = TimedCall(platform.stopwatch(self._device)), PHASES[0]
        self._open_data()
        try:
            yield self._call
        finally:
            self._call = None
            self._close_data()

    @contextlib.contextmanager
    def phase(self, name: str, mb: int | None = None, *, label: str | None = None) -> Iterator[None]:
        """Count the time inside as the phase ``name``. Afterwards the enclosing phase continues.

        Autograd may enter a phase from its own thread, while the calling thread waits.

        Args:
            name: one of :data:`PHASES`.
            mb: int. Index of the micro-batch, for the name of the range in a profile.
            label: name of the range, instead of one made of ``name`` and ``mb``.
        """
        outer, self._phase = self._phase, name
        self._mark(name)
        label = label or (name if mb is None else f"{name} mb {mb}")
        try:
            with self._range(label) if self._shown else contextlib.nullcontext():
                yield
        finally:
            self._phase = outer
            self._mark(outer)

    def move(self, name: str, seconds: float) -> None:
        """Count seconds that have just passed as the phase ``name`` instead of the active one. Without a call, does nothing."""
        if self._call is not None:
            self._call.move(self._phase, name, seconds)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of a micro-batch, ``function(value, mb, ...)``, so that its time counts as the phase ``name``."""

        def timed(value: Any, mb: MicroBatch, *args: Any, **options: Any) -> Any:
            with self.phase(name, mb.index):
                return function(value, mb, *args, **options)

        return timed

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show phases as ranges of the running profiler inside."""
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            self._close_data()

    def _mark(self, name: str) -> None:
        if self._call is not None:
            self._call.mark(name)

    @contextlib.contextmanager
    def _range(self, label: str) -> Iterator[None]:
        """Open a range of the profiler. The range of ``data`` pauses meanwhile; other ranges enclose this one."""
        paused_data = self._close_data()
        try:
            with record_function(label):
                yield
        finally:
            if paused_data:
                self._open_data()

    def _open_data(self) -> None:
        if self._shown and self._call is not None:
            self._data = record_function(PHASES[0])
            self._data.__enter__()

    def _close_data(self) -> bool:
        data, self._data = self._data, None
        if data is not None:
            data.__exit__(None, None, None)
        return data is not None


class TimedCall:
    """The times of one call of a verb.

    Args:
        watch: takes the marks. ``None`` for a call within another call: only its seconds are measured.
    """

    def __init__(self, watch: platform.Stopwatch | None) -> None:
        self._start = time.perf_counter()
        self._watch = watch
        self._names: list[str] = []
        self._marks: list[object] = []
        self._moves: list[tuple[str, str, float]] = []
        self.mark(PHASES[0])

    def mark(self, name: str) -> None:
        """Record that the phase ``name`` begins or continues."""
        if self._watch is not None:
            self._names.append(name)
            self._marks.append(self._watch.mark())

    def move(self, source: str, name: str, seconds: float) -> None:
        """Record that seconds of the phase ``source`` belong to the phase ``name``."""
        self._moves.append((source, name, seconds))

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the start of the call, and those of each phase that was entered. Waits for the device."""
        laps = [] if self._watch is None else self._watch.laps([*self._marks, self._watch.mark()])
        total = time.perf_counter() - self._start
        entered = {*self._names, *(name for _, name, _ in self._moves)}
        timings = dict.fromkeys((name for name in PHASES if name in entered), 0.0)
        for name, seconds in zip(self._names, laps, strict=True):
            timings[name] += seconds
        # A device may have computed meanwhile, so that the phase was shorter.
        for source, name, seconds in self._moves:
            moved = min(seconds, timings.get(source, 0.0))
            timings[name] += moved
            timings[source] -= moved
        return total, timings
