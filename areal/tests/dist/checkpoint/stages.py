"""Stages of saves and of updates on disk, as the library logs them: where tests kill a process or fill the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGERS = ("areal.engine.checkpoint", "areal.weight_sync.disk")


class _Stages(logging.Handler):
    """Calls a function with the stage at the end of each message, in the thread that logs it. Errors go to that thread."""

    def __init__(self, reached: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._reached = reached

    def emit(self, record: logging.LogRecord) -> None:
        self._reached(record.getMessage().rpartition(": ")[2])


@contextmanager
def at_stages(reached: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the name of each stage that this process reaches in the block."""
    handler, loggers = _Stages(reached), [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
