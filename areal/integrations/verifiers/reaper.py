"""Kills the processes that harnesses leave, also after a kill of this process. Runs as a script of the standard library."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

MARK = "AREAL_VERIFIERS_EPISODE"
"""Environment variable of all processes of an episode."""

_ROUNDS = 100
"""Number of searches: a process may start another one between two."""

_SECONDS = 1.0
"""Time between two looks at the parent."""


class Reaper:
    """Process that kills all processes with a mark when it is left, or when this process dies. On systems without ``/proc``, it does nothing.

    verifiers starts each harness in a separate session of the system, so that neither a signal to this process group nor the end of this
    process ends it.

    Args:
        mark: value of the environment variable ``MARK``.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Reaper:
        if Path("/proc/self/environ").exists():
            # In a separate session: a signal to the process group of this process must not end it.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", __file__, self._mark, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._process is not None and self._process.stdin is not None:
            # A byte: while a forked child of this process has the pipe too, its end cannot be read.
            self._process.stdin.write(b".")
            self._process.stdin.close()
            await self._process.wait()


def marked(mark: str) -> list[int]:
    """Return the ids of all processes whose environment has the mark. The environment of an ended process is empty."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or belongs to another user
        if wanted in variables:
            found.append(int(path.parent.name))
    return found


def kill_marked(mark: str) -> None:
    """Kill all processes with the mark, and those that they start meanwhile."""
    for _ in range(_ROUNDS):
        left = marked(mark)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def wait_for_end(parent: int) -> None:
    """Wait until the episode is left, which writes to stdin, or its process ``parent`` ends, which closes stdin.

    Forked children of this process keep stdin open. The system then names another parent.
    """
    while os.getppid() == parent and not select.select([sys.stdin], [], [], _SECONDS)[0]:
        pass


if __name__ == "__main__":
    wait_for_end(int(sys.argv[2]))
    kill_marked(sys.argv[1])
