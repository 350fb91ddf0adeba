"""The devices of a mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

from areal.api.parallel import ParallelDims
from areal.engine.jax.mesh import _devices_of, check_experts_of

DEVICES: Any = [SimpleNamespace(process_index=process, id=id) for id, process in enumerate((1, 0, 0, 2, 1))]


def test_ranks_have_the_first_device_of_their_process() -> None:
    """On a TPU, JAX may number the processes in another order than torch numbers the ranks."""
    assert [device.id for device in _devices_of([2, 0, 1], DEVICES)] == [3, 1, 0]


def test_devices_of_a_process_are_consecutive_ranks() -> None:
    assert [device.id for device in _devices_of([1, 0], DEVICES, 2)] == [0, 4, 1, 2]


def test_processes_that_do_not_see_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"processes 0, 0 of JAX.*set TPU_PROCESS_ADDRESSES"):
        _devices_of([0, 0], DEVICES)


@pytest.mark.parametrize(
    "backend", ["jax:(attn:d1c2|ffn:d1e2)", "jax:(attn:d1r2|ffn:d1e2)", "jax:(attn:d1c2t2|ffn:d1e4)"]
)
def test_experts_over_ranks_of_c_or_r_are_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="spreads experts over ranks of d and t, and d1 has no groups of 2"):
        check_experts_of(ParallelDims.parse(backend), 8)


@pytest.mark.parametrize("backend", ["jax:e2", "jax:d2e2c2", "jax:(attn:d2t2|ffn:d2e2)", "jax:(attn:d1t2|ffn:d1e2)"])
def test_experts_over_ranks_of_d_and_t_are_accepted(backend: str) -> None:
    check_experts_of(ParallelDims.parse(backend), 8)
