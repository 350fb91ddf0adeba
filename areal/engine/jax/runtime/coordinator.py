"""The coordination service of JAX in a separate process. :func:`start` runs this file as a script.

In a process of a rank, the service would be lost with that rank, and JAX ends every process whose service is lost. This process ends
when the last rank has closed its connection to it.
"""

from __future__ import annotations

import contextlib
import json
import select
import selectors
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

from jaxlib import _jax

_START = 60.0
"""Seconds that the process may take to start."""


@dataclass(frozen=True)
class Coordinator:
    """A running service.

    Attributes:
        port: of the service.
        lifeline: port to which each rank keeps a connection open.
    """

    port: int
    lifeline: int


def start(port: int, size: int, heartbeat: int) -> Coordinator:
    """Start the service for a world of ``size`` ranks.

    Args:
        port: int. 0 chooses a free port, which no other program can take afterwards.
        heartbeat: seconds without a sign of life after which a rank is lost.

    Raises:
        RuntimeError: the service did not start; says why.
    """
    command = [sys.executable, "-P", __file__, str(port), str(size), str(heartbeat)]
    # A separate session: a signal to the ranks of a terminal or a launcher must not end it.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=process.wait, name="reaper of JAX's coordinator", daemon=True).start()
    stdout = process.stdout
    line = b""
    if stdout is not None:
        with stdout:
            if select.select([stdout], [], [], _START)[0]:
                line = stdout.readline()
    if not line:
        process.kill()
    answer = json.loads(line or '{"error": "it did not answer"}')
    if "error" in answer:
        raise RuntimeError(f"JAX's coordination service could not start at port {port}: {answer['error']}")
    return Coordinator(**answer)


def _serve(port: int, size: int, heartbeat: int) -> None:
    """Run the service until the last rank has left. Prints the ports, or an error, as one line of JSON."""
    with contextlib.ExitStack() as stack:
        try:
            # gRPC would share a port with another service. A port that is bound here is not given to anybody else.
            reserved = stack.enter_context(_bound(port))
            port = reserved.getsockname()[1]
            # The name keeps the service alive.
            service = _jax.get_distributed_runtime_service(
                f"[::]:{port}", size, heartbeat_timeout=heartbeat, shutdown_timeout=5, recoverable=True
            )
            listener = stack.enter_context(_bound(0))
            listener.listen(size)
        except (OSError, RuntimeError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return
        print(json.dumps({"port": port, "lifeline": listener.getsockname()[1]}), flush=True)
        _wait_for_all_to_leave(listener)
        service.shutdown()


def _bound(port: int) -> socket.socket:
    """Return a socket that is bound to a port, in the same way as gRPC's."""
    if port:
        # SO_REUSEPORT, set below, would allow a port on which another service listens.
        with socket.socket(socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    bound = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    if bound.family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("", port))
    return bound


def _wait_for_all_to_leave(listener: socket.socket) -> None:
    """Accept connections until the last one is closed, or there was none in time."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    n_open, limit = 0, _START
    while ready := selector.select(None if n_open else limit):
        for key, _ in ready:
            if key.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
                n_open += 1
            elif isinstance(key.fileobj, socket.socket):
                selector.unregister(key.fileobj)
                key.fileobj.close()
                n_open, limit = n_open - 1, 0.0


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
