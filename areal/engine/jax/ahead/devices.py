"""Devices that are not there: those of a TPU topology, for which the compiler of TPUs runs on a CPU, or virtual devices of a CPU."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec

import jax
from jax.experimental import topologies

_LARGEST = 1024
"""Most devices of a topology."""


def planned_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a topology, in the order of the engine's ranks. For a process without an engine: JAX then uses its CPU alone.

    Args:
        topology: ``GENERATION:SHAPE`` of TPU chips, such as ``v5p:2x2x1``, or ``cpu:N`` for virtual devices of this process.

    Raises:
        ValueError: the topology does not exist, or its compiler is not installed.
    """
    # Tracing makes small arrays: on this host's CPU, not on a TPU that another process may use.
    jax.config.update("jax_platforms", "cpu")
    generation, _, shape = topology.partition(":")
    if generation == "cpu" and shape.isdigit() and int(shape) > 0:
        return _cpus(int(shape))
    if find_spec("libtpu") is None:
        raise ValueError(
            f"--topology {topology}: the compiler of TPUs is not installed: pip install 'areal[tpu-compile]', or choose cpu:N"
        )
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--topology {topology}: {reason}; choose chips of v4, v5e, v5p, v6e or tpu7x in multiples of 2x2 or 2x2x1, such as v5e:2x4 "
            "or v5p:2x2x2"
        ) from error
    if len(devices) > _LARGEST:
        raise ValueError(f"--topology {topology} has {len(devices)} devices: choose one of at most {_LARGEST}")
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def _cpus(number: int) -> list[jax.Device]:
    """Return virtual devices of a CPU.

    Raises:
        ValueError: JAX has started with fewer.
    """
    # An error says that JAX has started, with other devices.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", number)
    devices = jax.devices("cpu")
    if len(devices) < number:
        raise ValueError(f"--topology cpu:{number}: JAX has started with {len(devices)} devices in this process")
    return devices[:number]
