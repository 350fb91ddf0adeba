"""Tracebacks of other processes."""

from __future__ import annotations


class RemoteTraceback(Exception):
    """Traceback of an error in another process, chained as the cause of the error that this process raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
