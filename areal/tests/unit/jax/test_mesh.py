"""The devices of a mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

from areal.engine.jax.mesh import _devices_of

DEVICES: Any = [SimpleNamespace(process_index=process, id=id) for id, process in enumerate((1, 0, 0, 2, 1))]


def test_ranks_have_the_first_device_of_their_process() -> None:
    """On a TPU, JAX may number the processes in another order than torch numbers the ranks."""
    assert [device.id for device in _devices_of([2, 0, 1], DEVICES)] == [3, 1, 0]


def test_devices_of_a_process_are_consecutive_ranks() -> None:
    assert [device.id for device in _devices_of([1, 0], DEVICES, 2)] == [0, 4, 1, 2]


def test_processes_that_do_not_see_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"processes 0, 0 of JAX.*set TPU_PROCESS_ADDRESSES"):
        _devices_of([0, 0], DEVICES)
