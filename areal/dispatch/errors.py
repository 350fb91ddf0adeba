"""Errors of the processes that run the ranks."""

from __future__ import annotations

from typing import Any


class WorkerLostError(RuntimeError):
    """The process of a rank died, or does not move any more. The processes of the other ranks take no more calls.

    Attributes:
        rank: rank of the process.
        node: name of its node.
        pid: its process id, on that node.
        output: last lines that it printed; empty where they cannot be read any more.
    """

    def __init__(self, text: str, rank: int, node: str, pid: int, output: str = "") -> None:
        super().__init__(text)
        self.rank, self.node, self.pid, self.output = rank, node, pid, output

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerLostError, (str(self), self.rank, self.node, self.pid, self.output)


def refusal(text: str, ended: Exception) -> RuntimeError:
    """Return the error of a call that processes do not take any more. A loss between two calls is raised by the next one.

    Args:
        text: of the error.
        ended: why the processes take no call.
    """
    if isinstance(ended, WorkerLostError):
        return WorkerLostError(text, ended.rank, ended.node, ended.pid, ended.output)
    return RuntimeError(text)
