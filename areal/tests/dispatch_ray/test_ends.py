"""Other ends of processes: that of the driver, of a node, and of ranks that wait for one that has failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from areal.dispatch.errors import WorkerLostError
from areal.dispatch.ray import RayWorkers
from areal.dispatch.workplace import Workplace
from areal.tests.dispatch_ray import functions
from areal.tests.dispatch_ray.functions import run

pytestmark = pytest.mark.thorough

DRIVER = """
import sys, time, ray
from areal.dispatch.ray import RayWorkers
from areal.tests.dispatch_ray import functions
ray.init(sys.argv[1], log_to_driver=False)
workers = RayWorkers(2)
functions.start(workers, functions.oversleep, [1, 1])
time.sleep(3)
print(*[station.pid for station in workers.stations], flush=True)
time.sleep(600)
"""

TWO_NODES = """
import os, signal, time, ray
from ray.cluster_utils import Cluster
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.ray import RayWorkers
from areal.tests.dispatch_ray import functions
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 * 2**20})
nodes = [cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20) for _ in range(2)]
ray.init(cluster.address, log_to_driver=False)
workers = RayWorkers(4, processes_per_bundle=2, strategy="STRICT_SPREAD", environment={"OMP_NUM_THREADS": "1"})
ids = [station.node for station in workers.stations]
assert ids[0] == ids[1] != ids[2] == ids[3], ids
assert functions.run(workers, functions.all_reduce, [1.0, 2.0, 3.0, 4.0]) == [10.0] * 4
its = [each["LOCAL_RANK"] + each["LOCAL_WORLD_SIZE"] for each in functions.run(workers, functions.environment)]
assert its == ["02", "12", "02", "12"], its
pending = functions.start(workers, functions.oversleep, [0] * 4)
time.sleep(1)
gone = next(node for node in nodes if node.node_id == ids[2])
begin = time.monotonic()
cluster.remove_node(gone, allow_graceful=False)
try:
    pending.result(60)
except WorkerLostError as error:
    assert error.rank in (2, 3), error
    print("LOST AFTER", time.monotonic() - begin)
    assert time.monotonic() - begin < 15
cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
workers.restart()
assert functions.run(workers, functions.all_reduce, [1.0, 2.0, 3.0, 4.0]) == [10.0] * 4
workers.close()
ray.shutdown()
cluster.shutdown()
print("RESTARTED")
"""


def fail_on_rank_0(workplace: Workplace, argument: Any) -> None:
    """Fail on one rank, outside of an engine that would tell the others."""
    functions.all_reduce(workplace, 1.0)
    if workplace.rank == 0:
        raise ValueError("a bad value")
    functions.all_reduce(workplace, 1.0)


@pytest.mark.timeout(240)
def test_ranks_that_wait_for_a_failed_one_have_less_time(cluster: Any) -> None:
    with RayWorkers(2, grace_seconds=3) as workers:
        begin = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"rank 1 .* has not moved for 3 s"):
            run(workers, fail_on_rank_0)
        assert time.monotonic() - begin < 30


@pytest.mark.timeout(280)
def test_processes_end_with_the_driver(cluster: Any) -> None:
    address = cluster.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    limit = time.monotonic() + 60
    while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < limit, f"processes {alive} still run"
        time.sleep(0.1)


@pytest.mark.timeout(580)
def test_lost_node() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TWO_NODES],
        capture_output=True,
        text=True,
        timeout=560,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert "RESTARTED" in ended.stdout, ended.stdout + ended.stderr
