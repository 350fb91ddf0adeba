"""The world of JAX processes: the ranks of torch.distributed's default group, joined once in the life of a process."""

from __future__ import annotations

import logging
import os
import socket

import jax
from jax._src import distributed

from areal.utils.distributed import ControlPlane

logger = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 20
_ATTEMPTS = 3


def join(control: ControlPlane, address: str | None) -> None:
    """Make one JAX world of the ranks of an engine, unless they are one already. Collective over the ranks.

    Args:
        control: control plane over all ranks.
        address: ``host:port`` of the coordinator; by default a free port of the first rank's host.

    Raises:
        ValueError: the process is in a JAX world of another size, or JAX was used before it could join one.
    """
    if control.size == 1:
        return
    state = distributed.global_state
    control.attempt(lambda: _check(control.rank, control.size))
    if all(control.gather(state.client is not None)):
        return
    if address is not None:
        control.attempt(lambda: _initialize(address, control))
        return
    for attempt in range(_ATTEMPTS):
        # The port is free now, and may be taken when the coordinator binds it: then all ranks try another.
        chosen = control.gather(_free_address() if control.rank == 0 else None)[0]
        try:
            control.attempt(lambda chosen=chosen: _initialize(chosen, control))
        except RuntimeError:
            if attempt + 1 == _ATTEMPTS:
                raise
            logger.warning("JAX's coordinator could not start at %s: another port is tried", chosen)
        else:
            return


def _check(rank: int, size: int) -> None:
    state = distributed.global_state
    if state.client is not None and (state.num_processes, state.process_id) != (size, rank):
        raise ValueError(
            f"this process is rank {state.process_id} of {state.num_processes} in JAX, and rank {rank} of {size} in torch.distributed: a process "
            "joins one JAX world; start the job with the same ranks in both"
        )
    if state.client is None and jax._src.xla_bridge.backends_are_initialized():
        raise ValueError(
            f"JAX was used in this process before it joined a world of {size}: create the engine before the first array, or call "
            "jax.distributed.initialize yourself"
        )


def _initialize(address: str, control: ControlPlane) -> None:
    # Without this, the coordination service ends the processes that survive the loss of another one.
    jax.config.update("jax_enable_recoverability", True)
    if jax.config.jax_platforms in (None, "", "cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        control.size,
        control.rank,
        local_device_ids=_local_devices(),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )


def _local_devices() -> list[int] | None:
    """Return this rank's device among those of its host; ``None`` for all that it sees, on a CPU and where each rank sees one."""
    return None


def _free_address() -> str:
    host = os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{host}:{listener.getsockname()[1]}"
