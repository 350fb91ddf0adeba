"""The world of JAX processes: the ranks of torch.distributed's default group.

A process joins it once, before JAX's backend starts, and all its engines share it. After a fault that left ranks in the middle of a
program, every rank leaves it, and the next engine joins another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import torch
from jax._src import distributed, xla_bridge
from jax.extend.backend import clear_backends
from jaxlib import _jax

from areal.engine.jax.runtime import coordinator
from areal.utils import platform
from areal.utils.distributed import ControlPlane

logger = logging.getLogger(__name__)

_CONNECT = 120
"""Seconds to connect to the coordination service."""

_SHUTDOWN = 5
"""Seconds that a rank may take to leave."""


@dataclass
class _Membership:
    """Resources of this process in a world that :func:`join_world` has made.

    Attributes:
        lifeline: connection to the process of the coordination service, which ends with the last of them.
        listeners: addresses at which JAX's collectives of all ranks listen, on CPUs.
    """

    lifeline: socket.socket
    listeners: set[Address] = field(default_factory=set)


_memberships: list[_Membership] = []
"""The membership of this process, if there is one."""


def join_world(
    control: ControlPlane, address: str | None, device: torch.device, heartbeat: float, devices: int = 1
) -> None:
    """Make one JAX world of the processes of an engine, unless they are one already. Collective over the processes.

    Args:
        control: control plane over all ranks.
        address: ``host:port`` of the coordination service; by default a free port of the first rank's host.
        device: torch's device of this rank.
        heartbeat: seconds without a sign of life after which the template takes a rank for lost.
        devices: devices of each process.

    Raises:
        ValueError: the process is in a JAX world of other ranks, JAX was used before it could join one, a process has another number of
            devices, or the address is not valid.
        RuntimeError: the coordination service does not start.
    """
    if control.size == 1:
        if devices > 1 and not xla_bridge.backends_are_initialized():
            jax.config.update("jax_num_cpu_devices", devices)
    else:
        _join(control, address, device, heartbeat, devices)
    control.attempt(lambda: _check_devices(devices))


def _join(control: ControlPlane, address: str | None, device: torch.device, heartbeat: float, devices: int) -> None:
    """Make one JAX world of several processes, unless they are one already."""
    host, port = control.attempt(lambda: _host_and_port(address, control.address))
    worlds = control.attempt_and_gather(lambda: _check(control.rank, control.size))
    if worlds[0] is not None and len(set(worlds)) == 1:
        return
    control.attempt(lambda: _check_alike(worlds))
    control.attempt(lambda: _configure(device, devices))

    # The service first: no rank waits for one that does not start. It must not give up a rank before the template does.
    seconds = max(100, round(3 * heartbeat))
    started = control.attempt_and_gather(
        lambda: coordinator.start(port, control.size, seconds) if control.rank == 0 else None
    )[0]
    host = control.gather(host)[0]
    if started is None:
        raise RuntimeError("the first rank has not started JAX's coordination service")
    control.attempt(lambda: _connect(host, started, control, seconds))

    # The backend starts here, on all ranks together.
    before = listening()
    control.attempt(jax.devices)
    for listeners in control.gather(listening() - before):
        _memberships[-1].listeners |= listeners
    if devices == 1 < len(jax.local_devices()):
        logger.warning(
            "JAX: rank %d uses one of its %d devices: set jax.devices_per_process, or start a process for each device, such as with "
            "resources={'TPU': 1} on Ray",
            control.rank,
            len(jax.local_devices()),
        )
    if control.rank == 0:
        logger.info("JAX: a world of %d processes, coordinated at %s:%d", control.size, host, started.port)


def abort() -> None:
    """Wake threads that wait in a collective of JAX on a CPU, by an error. From any thread; raises nothing."""
    for membership in _memberships:
        shut_down(membership.listeners)


def leave_after_fault(control: ControlPlane) -> None:
    """Leave the world if a fault has ended the engine: programs of some ranks may wait for others for ever.

    The arrays of all engines of this process are lost.
    """
    if control.verdict is None or not _memberships:
        return
    membership = _memberships.pop()
    shut_down(membership.listeners)
    with contextlib.suppress(Exception):  # the service may be lost as well
        jax.distributed.shutdown()
    # An engine of this process alone may be the next.
    state = distributed.global_state
    state.client, state.process_id, state.num_processes = None, 0, 1
    clear_backends()
    membership.lifeline.close()


# ---- before joining


def _check(rank: int, size: int) -> str | None:
    """Return the address of the world that this process is in, or ``None``."""
    state = distributed.global_state
    if not jax.distributed.is_initialized():
        if xla_bridge.backends_are_initialized():
            raise ValueError(
                f"JAX was used in this process before it joined a world of {size}: create the engine before the first array, "
                "or call jax.distributed.initialize yourself before it"
            )
        return None
    if (state.num_processes, state.process_id) != (size, rank):
        raise ValueError(
            f"this process is rank {state.process_id} of {state.num_processes} in JAX, and rank {rank} of {size} in torch.distributed: "
            "a process joins one JAX world; start the job with the same ranks in both"
        )
    return str(state.coordinator_address)


def _check_alike(worlds: list[str | None]) -> None:
    if any(worlds):
        named = ", ".join(f"rank {rank} in {world or 'none'}" for rank, world in enumerate(worlds))
        raise ValueError(f"the ranks are not in one JAX world: {named}; leave jax.distributed.initialize to the engine")


def _check_devices(devices: int) -> None:
    """Raise unless this process has as many devices as it is to use. One device is the first of any number."""
    found = len(jax.local_devices()) if devices > 1 else devices
    if found != devices:
        raise ValueError(
            f"jax.devices_per_process = {devices}, but JAX has {found} {jax.local_devices()[0].platform} devices in this process: set it to "
            f"{found}, or on CPUs create the engine before the first array"
        )


def _configure(device: torch.device, devices: int) -> None:
    """Set what the backend reads at its start."""
    # SIGTERM ends a process: JAX would only take note of it.
    jax.config.update("jax_enable_preemption_service", False)
    # Without this, JAX ends the processes that survive the loss of another one.
    jax.config.update("jax_enable_recoverability", True)
    # On CPUs: so many devices in each process, also if XLA_FLAGS ask for others.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", devices)
    # On GPUs: the one of this rank. On TPUs, the runtime has distributed them.
    gpu = platform.local_gpu(device)
    if gpu is not None and devices > 1:
        raise ValueError(
            f"jax.devices_per_process = {devices} with several processes on GPUs: torch has one GPU in each of them; start a process for each "
            "GPU, and leave it out"
        )
    if gpu is not None:
        jax.config.update("jax_cuda_visible_devices", str(gpu))
        jax.config.update("jax_rocm_visible_devices", str(gpu))


def _host_and_port(address: str | None, default_host: str) -> tuple[str, int]:
    if address is None:
        return default_host, 0
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"jax.coordinator = {address!r}: expected 'host:port' of the first rank, such as '10.0.0.1:1234'"
        )
    return host.strip("[]"), int(port)


# ---- joining


def _connect(host: str, service: coordinator.Coordinator, control: ControlPlane, heartbeat: int) -> None:
    """Connect to the service, as ``jax.distributed.initialize`` does in a process that does not run it."""
    lifeline = socket.create_connection((host, service.lifeline), timeout=_CONNECT)
    address = f"[{host}]:{service.port}" if ":" in host else f"{host}:{service.port}"
    client = _jax.get_distributed_runtime_client(
        address,
        control.rank,
        init_timeout=_CONNECT,
        heartbeat_timeout=heartbeat,
        shutdown_timeout=_SHUTDOWN,
        use_compression=True,
    )
    try:
        client.connect()
    except Exception:
        lifeline.close()
        raise
    state = distributed.global_state
    state.process_id, state.num_processes = control.rank, control.size
    state.coordinator_address, state.client = address, client
    _memberships.append(_Membership(lifeline))


# ---- connections of JAX's collectives on a CPU


Address = tuple[str, int]


def listening() -> set[Address]:
    """Return the addresses at which this process listens."""
    found = set()
    for connection in _sockets():
        with connection, contextlib.suppress(OSError):
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_address(connection.getsockname()))
    return found


def shut_down(listeners: set[Address]) -> None:
    """Shut down all connections with one of these listening addresses at either end. Threads that wait for one get an error.

    JAX cannot abort a collective. If its connections are shut down, it raises, as those of torch's gloo groups do
    (:mod:`areal.utils.group_set`). JAX opens them when a program first needs them: they are recognized by their ports.
    """
    for connection in _sockets():
        # A socket without a peer is a listener, or not of TCP.
        with connection, contextlib.suppress(OSError):
            if {_address(connection.getsockname()), _address(connection.getpeername())} & listeners:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets; nothing where the system does not list them."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                duplicate = socket.socket(fileno=os.dup(int(name)))
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                    yield duplicate
                else:
                    duplicate.close()


def _address(name: tuple[str, int]) -> Address:
    return name[0], name[1]
