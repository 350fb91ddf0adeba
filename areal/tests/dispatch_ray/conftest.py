"""Fixtures: Ray on this machine, and two processes that tests share unless they end them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

START = {
    "address": "local",  # also where a cluster runs on this machine
    "num_cpus": 4,
    "resources": {"chip": 2, "TPU": 8, "slot": 1000},
    "include_dashboard": False,
    "log_to_driver": False,
    "object_store_memory": 256 * 2**20,
}
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
"""Of clusters. Where the cores are busy, workers of the default niceness (15) take minutes to start."""
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

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        ray.init(**START)
    except Exception:
        ray.shutdown()
        ray.init(**START)
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a placement group, an actor or a resource in the cluster of all tests."""
    if "cluster" not in request.fixturenames:
        yield
        return
    # Only with Ray.
    from areal.tests.dispatch_ray.leftovers import contents, leftovers

    ray = request.getfixturevalue("cluster")
    before = contents(ray)
    yield
    left = leftovers(ray, before)
    assert not left, left


@pytest.fixture
def apart() -> Iterator[dict[str, str]]:
    """Environment of another cluster, whose files are in a separate directory, so that no other driver connects to it."""
    if "WORLD_SIZE" in os.environ:
        pytest.skip("starts processes of its own, which torchrun's ranks would do each")
    # A short path, because sockets are in it.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    yield {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": folder}
    # A program that failed has left its nodes, whose command lines name the directory.
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder in process.read_text():
                os.kill(int(process.parent.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def pair(cluster: Any) -> Iterator[Any]:
    """Two processes, which no test ends."""
    from areal.dispatch.ray import RayWorkers

    with RayWorkers(2, max_result_bytes=LIMIT, environment={"OMP_NUM_THREADS": "1"}) as workers:
        yield workers
