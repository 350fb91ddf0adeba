"""Other ends of processes: in any verb, with the driver, and while they wait for a failed rank."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.api import FinetuneSpec, SaveLoadMeta, TrainEngine
from areal.dispatch import WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.executor import RankObjects
from areal.dispatch.ray import RayWorkers
from areal.tests.dispatch_ray import functions
from areal.tests.dispatch_ray.functions import run, wait_until_ended
from areal.tests.dist.dispatch.results import same, untimed
from areal.tests.harness.limits import promptly
from areal.tests.harness.programs import FLAGS
from areal.tests.harness.tiny import config, global_batch, loss
from areal.weight_sync.disk import DiskTransport

DRIVER = """
import sys, time, ray
from areal.dispatch.ray import RayWorkers
from areal.tests.dispatch_ray import functions
ray.init(sys.argv[1], log_to_driver=False)
workers = RayWorkers(2)
functions.start(workers, functions.oversleep, [1, 1])
time.sleep(3)
print(*[info.pid for info in workers.process_infos], flush=True)
time.sleep(600)
"""


def fail_on_rank_0(rank_objects: RankObjects, argument: Any) -> None:
    """Fail on one rank, outside of an engine that would tell the others."""
    functions.all_reduce(rank_objects, 1.0)
    if rank_objects.rank == 0:
        raise ValueError("a bad value")
    functions.all_reduce(rank_objects, 1.0)


@pytest.mark.timeout(240)
def test_ranks_that_wait_for_a_failed_one_have_less_time(cluster: Any) -> None:
    """And the error of the one is raised, with the loss of the others as its consequence."""
    with (
        RayWorkers(2, grace_seconds=3) as workers,
        promptly(),
        pytest.raises(ValueError, match=r"(?s)^rank 0: a bad value\nAnd: rank 1 .* has not moved for 3 s") as raised,
    ):
        run(workers, fail_on_rank_0)
    assert "in fail_on_rank_0" in str(raised.value.__cause__)
    assert isinstance(workers.lost, RuntimeError)


def killed_in(place: str) -> Callable[[TrainEngine, Any], None]:
    """Return a function that prepares the process of rank 1 to be killed at a place."""

    def kill(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def plant(engine: Any, shard: Any) -> None:
        if os.environ["RANK"] == "0":
            return
        if place == "save":
            os.fsync = kill
        else:
            engine.named_tensors = kill

    return plant


@pytest.mark.timeout(580)
def test_rank_killed_where_it_writes_is_replaced(cluster: Any, tmp_path: Path) -> None:
    """The steps after it are those of a run without the loss, to the bit. Loss in a step is tested in ``test_loss``."""
    calls: dict[str, Callable[[WorkerGroup], Any]] = {
        "save": lambda group: group.save(SaveLoadMeta(tmp_path / "second", weight_format="dcp")),
        "weight sync": lambda group: group.transport(
            lambda engine: DiskTransport(engine.control, tmp_path / "weights")
        ).send(group, 1),
    }
    with RayWorkers(2) as workers, WorkerGroup(config("fsdp:d2"), workers) as group:
        group.initialize(FinetuneSpec(total_train_steps=1000))
        group.train_batch(global_batch(), loss)
        group.save(SaveLoadMeta(tmp_path / "first", weight_format="dcp"))
        expected = untimed(group.train_batch(global_batch(1), loss))
        for place, call in calls.items():
            pid = workers.process_infos[1].pid
            group.run(killed_in(place))
            with promptly(), pytest.raises(WorkerLostError, match=rf"rank 1 \(pid {pid} "):
                call(group)
            group.restart()
            assert same(untimed(group.train_batch(global_batch(1), loss)), expected), place


@pytest.mark.timeout(280)
def test_address_and_port_can_be_set(cluster: Any) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"a process could not listen on port = {port}"):
            RayWorkers(1, port=port)
    workers = RayWorkers(1, port=port, address="127.0.0.1")
    its = run(workers, functions.environment)[0]
    assert (its["MASTER_ADDR"], its["MASTER_PORT"]) == ("127.0.0.1", str(port))
    assert run(workers, functions.all_reduce, [2.0]) == [2.0]
    # Processes end with the last reference to them, without close().
    pid = workers.process_infos[0].pid
    del workers
    gc.collect()
    wait_until_ended([pid])


@pytest.mark.timeout(280)
def test_processes_end_with_the_driver(cluster: Any) -> None:
    address = cluster.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until_ended(pids)


def runtime_of_jax(rank_objects: RankObjects, _: Any) -> tuple[str, int, int, str]:
    """Return the platform, the number of processes, the number of devices of this one, and a variable that it was started with."""
    jax = importlib.import_module("jax")
    return jax.default_backend(), jax.process_count(), len(jax.local_devices()), os.environ["XLA_FLAGS"]


def killed_in_a_program(engine: Any, shard: Any) -> None:
    """Prepare rank 1 to be killed where the other rank waits for it in a program."""
    if os.environ["RANK"] == "1":
        importlib.import_module("areal.engine.jax.bridge")._pull = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(580)
def test_jax_runs_on_tpu_hosts_and_a_dead_rank_is_replaced(cluster: Any, tmp_path: Path) -> None:
    """The hosts have chips by name only: JAX is told to use the CPU."""
    pytest.importorskip("jax")
    # Several devices of a CPU would be taken for several chips: each process has one.
    variables = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=4",
        "OMP_NUM_THREADS": "1",
    }
    with RayWorkers(2, resources={"TPU": 4}, environment=variables) as workers:
        # Each process has its own chips, and is alone with them.
        assert len({info.devices for info in workers.process_infos}) == 2
        assert all(len(info.devices) == 4 for info in workers.process_infos)
        run(workers, functions.compile_once)
        with pytest.raises(ValueError, match=r"jax:d4.* 2"):
            WorkerGroup(config("jax:d4"), workers)
        with WorkerGroup(config("jax:d2"), workers) as group:
            group.initialize(FinetuneSpec(total_train_steps=1000))
            assert run(workers, runtime_of_jax) == [("cpu", 2, 1, variables["XLA_FLAGS"])] * 2
            group.train_batch(global_batch(), loss)
            group.save(SaveLoadMeta(tmp_path / "first", weight_format="dcp"))
            expected = untimed(group.train_batch(global_batch(1), loss))

            # The loss is named, and the new processes join a world of their own.
            pid = workers.process_infos[1].pid
            group.run(killed_in_a_program)
            with promptly(), pytest.raises(WorkerLostError, match=rf"rank 1 \(pid {pid} "):
                group.train_batch(global_batch(), loss)
            group.restart()
            assert same(untimed(group.train_batch(global_batch(1), loss)), expected)
