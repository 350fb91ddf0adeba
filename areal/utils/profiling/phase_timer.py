"""Where the time of a call goes: phases that share it out among them, so that their seconds sum to the call's."""

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

PHASES = ("data", "forward", "backward", "reduce", "optimizer")
"""Of a call. ``data`` is all that is none of the others."""


class PhaseTimer:
    """Notes when phases begin and end, on this rank. One of an engine.

    At every moment of a call one phase is going on: that which was entered last. A mark is taken where this changes: the time on a CPU; on a
    GPU an event in the stream that computes, so that nothing waits for the device until the call ends and :meth:`TimedCall.read` asks.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = PHASES[0]
        self._call: TimedCall | None = None
        self._shown = False
        self._data: AbstractContextManager[object] | None = None  # the range of ``data``, while no other is open

    @contextlib.contextmanager
    def call(self) -> Iterator[TimedCall]:
        """A call begins, in the phase ``data``. One within another is a part of that, and only the outer one has phases."""
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
        """Inside, time is that of the phase ``name``; then that of the phase around it goes on.

        Autograd may enter one from a thread of its own, while the thread that makes the call waits for it.

        Args:
            name: one of :data:`PHASES`.
            mb: index of the micro-batch, for the range that a profile shows. label: of that range, instead of both.
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

    def timed(self, name: str, half: Callable[..., Any]) -> Callable[..., Any]:
        """The same half of a micro-batch, ``half(what, mb, ...)``, as a phase."""

        def timed(what: Any, mb: MicroBatch, *args: Any, **options: Any) -> Any:
            with self.phase(name, mb.index):
                return half(what, mb, *args, **options)

        return timed

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, phases are ranges in the profiler that is on."""
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
        """Phases of a call take turns with ``data``; phases within phases lie in these."""
        beside_data = self._close_data()
        try:
            with record_function(label):
                yield
        finally:
            if beside_data:
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
    """One call of a verb, from its beginning.

    Args:
        watch: takes marks; ``None`` in a part of another call, which knows its seconds alone.
    """

    def __init__(self, watch: platform.Stopwatch | None) -> None:
        self._start = time.perf_counter()
        self._watch = watch
        self._names: list[str] = []
        self._marks: list[object] = []
        self.mark(PHASES[0])

    def mark(self, name: str) -> None:
        """The phase ``name`` begins, or goes on."""
        if self._watch is not None:
            self._names.append(name)
            self._marks.append(self._watch.mark())

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds until now, and of each phase that there was. Waits for the device to come here."""
        laps = [] if self._watch is None else self._watch.laps([*self._marks, self._watch.mark()])
        total = time.perf_counter() - self._start
        timings = dict.fromkeys((name for name in PHASES if name in self._names), 0.0)
        for name, seconds in zip(self._names, laps, strict=True):
            timings[name] += seconds
        return total, timings
