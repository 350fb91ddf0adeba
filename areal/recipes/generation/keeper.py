"""Keeps a server: ends it when the process that asked for it ends, in whatever way. Runs as a script of the standard library."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""


def end(server: subprocess.Popen[bytes]) -> None:
    """End a server and all processes of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def keep(command: list[str]) -> int:
    """Start a server, and end it once the standard input is closed. Returns its exit code."""
    # Of its own group: a signal to that of the trainer, as by Ctrl-C, must not end it before the last evaluation.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        sys.stdin.buffer.read()
        end(server)

    threading.Thread(target=watch, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(keep(sys.argv[1:]))
