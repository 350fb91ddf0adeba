"""Fixtures: Ray on this machine, and two processes that tests share unless they end them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

START = {
    "num_cpus": 4,
    "resources": {"chip": 2},
    "include_dashboard": False,
    "log_to_driver": False,
    "object_store_memory": 256 * 2**20,
}
LIMIT = 2**20
"""Bytes of a result of the shared processes."""


def pytest_pycollect_makemodule() -> None:
    """Skip the folder without Ray, which its modules import."""
    if find_spec("ray") is None:
        pytest.skip("needs the extra ray", allow_module_level=True)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """Ray on this machine. The start fails where the machine is so busy that a part of Ray takes 30 s: one more try."""
    if "WORLD_SIZE" in os.environ:
        pytest.skip("starts processes of its own, which torchrun's ranks would do each")
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        ray.init(**START)
    except Exception:
        ray.shutdown()
        ray.init(**START)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="package")
def pair(cluster: Any) -> Iterator[Any]:
    """Two processes, which no test ends."""
    from areal.dispatch.ray import RayWorkers

    with RayWorkers(2, max_result_bytes=LIMIT, environment={"OMP_NUM_THREADS": "1"}) as workers:
        yield workers
