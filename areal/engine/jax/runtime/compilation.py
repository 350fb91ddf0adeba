"""Compilation of programs: their cache on disk, their number, and their seconds."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

logger = logging.getLogger(__name__)

_PREFIX = "/jax/core/compile/"
PROGRAM = f"{_PREFIX}backend_compile_duration"
"""Event of each program that is compiled, or read from the cache on disk."""

SHOWN = ("_evaluate", "_forward", "_pull", "_update")
"""Functions of the engine whose programs depend on the shapes of batches, or take long to compile."""


def use_cache(directory: str | None) -> None:
    """Keep compiled programs in a directory, for this process and its engines. ``None`` leaves JAX's own setting."""
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    reset_cache()  # otherwise, the first program of a process has decided whether there is a cache
    # All programs: a second start compiles none.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompileWatch:
    """Reports the seconds that this process spends on compiling to an engine.

    Args:
        spent: called with the seconds of each step of a compilation (trace, lowering, compiler), in any thread.

    Attributes:
        n_programs: programs so far.
        shapes: sizes of the running micro-batch, for the log.
        logs: whether the engine's programs are logged.
    """

    def __init__(self, spent: Callable[[float], None], *, logs: bool) -> None:
        self._spent = spent
        self.logs = logs
        self.n_programs = 0
        self.shapes = ""
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_time_span_listener(self._listen)

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(ValueError):
            jax.monitoring.unregister_event_time_span_listener(self._listen)

    def _listen(self, event: str, start_time: float, end_time: float, **about: str | int) -> None:
        if not event.startswith(_PREFIX):
            return
        # A function may be traced within another: the inner one has been counted.
        inner = sum(end - start for start, end in self._spans if start >= start_time)
        self._spans = [*(span for span in self._spans if span[0] < start_time), (start_time, end_time)]
        self._spent(max(end_time - start_time - inner, 0.0))
        if event == PROGRAM:
            self.n_programs += 1
            name = str(about.get("fun_name", "a program"))
            if self.logs and any(shown in name for shown in SHOWN):
                total = sum(end - start for start, end in self._spans)
                logger.info("JAX: compiled %s (%s) in %.1f s, program %d", name, self.shapes, total, self.n_programs)
            self._spans.clear()
