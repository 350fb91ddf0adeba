"""Processes that die or hang are noticed, the others are ended, and new ones go on from the last checkpoint."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import placement_group_table
from torch import Tensor

from areal.api import Batch, FinetuneSpec, SaveLoadMeta, TokenOutputs, TrainEngine
from areal.dispatch import WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.ray import RayWorkers
from areal.tests.dispatch_ray import functions
from areal.tests.dispatch_ray.functions import run, start, wait_until_ended
from areal.tests.dist.dispatch.results import same, untimed
from areal.tests.harness.limits import PROMPTLY, promptly, wait_until
from areal.tests.harness.tiny import config, global_batch, loss

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@contextmanager
def ending(workers: RayWorkers) -> Iterator[list[int]]:
    """Yield the process ids, close, and check that the processes end, and that their placement group is removed."""
    pids, groups = [info.pid for info in workers.process_infos], reserved() - 1
    yield pids
    workers.close()
    wait_until_ended(pids)
    assert reserved() == groups


def reserved() -> int:
    """Return the number of placement groups."""
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def wait_until_begun(workers: RayWorkers, rank: int) -> None:
    """Wait until a rank has printed that it begins."""
    limit = time.monotonic() + 90
    while not any(f"rank {rank} begins" in Path(file).read_text() for file in workers.process_infos[rank].files):
        assert time.monotonic() < limit, "the rank does not begin"
        time.sleep(0.02)


def loss_that_sleeps_on_rank_1(outputs: TokenOutputs, batch: Batch) -> Tensor:
    if os.environ["RANK"] == "1":
        print("rank 1 begins", flush=True)
        time.sleep(600)
    return loss(outputs, batch)


@pytest.mark.timeout(280)
def test_killed_rank(cluster: Any, tmp_path: Path) -> None:
    """While the other rank waits for it in a collective, and another call waits behind. The group goes on to the bit."""
    with RayWorkers(2, environment=ENVIRONMENT) as workers, WorkerGroup(config("fsdp:d2"), workers) as group:
        group.initialize(FinetuneSpec(total_train_steps=1000))
        group.train_batch(global_batch(), loss)
        group.save(SaveLoadMeta(tmp_path / "step", weight_format="dcp"))
        expected = [untimed(group.train_batch(global_batch(seed), loss)) for seed in (1, 2)]

        with ending(workers) as pids:
            first = group.start(TrainEngine.train_batch, global_batch(), loss_that_sleeps_on_rank_1)
            second = group.start(TrainEngine.forward_batch, global_batch())
            wait_until_begun(workers, 1)
            os.kill(pids[1], signal.SIGKILL)
            message = r"(?s)rank 1 \(pid \d+ on node .*\) died during train_batch.*restart\(\).*rank 1 begins"
            with promptly(), pytest.raises(WorkerLostError, match=message) as raised:
                first.result(60)
            lost = raised.value
            assert (lost.rank, lost.pid, lost.node) == (1, pids[1], workers.process_infos[1].node_name)
            assert "rank 1 begins" in lost.output
            with pytest.raises(WorkerLostError, match="rank 1"):
                second.result(10)
            with pytest.raises(WorkerLostError, match=r"(?s)restart\(\).*rank 1 .* died during train_batch"):
                group.zero_grad()
            with pytest.raises(
                WorkerLostError, match=r"save cannot run: rank 1 .* died during train_batch.*restart\(\)"
            ):
                run(workers, functions.rank_and_size, what="save")

        group.restart()
        assert same([untimed(group.train_batch(global_batch(seed), loss)) for seed in (1, 2)], expected)

        # Closed during a call.
        with ending(workers):
            pending = start(workers, functions.oversleep, [1, 1])
            wait_until_begun(workers, 1)
            workers.close()
            workers.close()
            # A thread that called Ray during ray.shutdown() would end this process.
            assert not workers._watch._thread.is_alive()
            with pytest.raises(RuntimeError, match="the processes were closed"):
                pending.result(10)
        with pytest.raises(RuntimeError, match=r"a call cannot run: the processes were closed.*restart\(\)"):
            run(workers, functions.rank_and_size)


@pytest.mark.timeout(280)
def test_process_that_is_left_goes_on_in_another_layout(cluster: Any, tmp_path: Path) -> None:
    """Without a new process: a kill costs what an engine and its checkpoint cost in a process that runs, and a second or two."""
    meta = SaveLoadMeta(tmp_path / "step", weight_format="dcp")
    with RayWorkers(2, environment=ENVIRONMENT) as workers, WorkerGroup(config("fsdp:d2"), workers) as group:
        group.initialize(FinetuneSpec(total_train_steps=1000))
        group.train_batch(global_batch(), loss)
        group.save(meta)
        expected = [group.train_batch(global_batch(seed), loss).grad_norm for seed in (1, 2)]

        pids, groups = [info.pid for info in workers.process_infos], reserved()
        pending = group.start(TrainEngine.train_batch, global_batch(), loss_that_sleeps_on_rank_1)
        wait_until_begun(workers, 1)
        os.kill(pids[1], signal.SIGKILL)
        with promptly(), pytest.raises(WorkerLostError):
            pending.result(60)
        begin = time.monotonic()
        group.restart(layout="fsdp:d1")
        restarted = time.monotonic() - begin
        assert [info.pid for info in workers.process_infos] == pids[:1]
        assert reserved() == groups
        steps = [group.train_batch(global_batch(seed), loss).grad_norm for seed in (1, 2)]
        assert steps == pytest.approx(expected, rel=1e-5)

        # The same without a loss.
        group.destroy()
        begin = time.monotonic()
        group.initialize(FinetuneSpec(total_train_steps=1000))
        group.load(meta)
        loaded = time.monotonic() - begin
        print(f"restart {restarted:.2f} s, load {loaded:.2f} s")
        # The fixed cost is a second or two, more on a busy machine; a load of a large model is minutes.
        assert restarted < 3 * loaded + PROMPTLY

        # More ranks are new processes.
        with ending(workers):
            group.restart(layout="fsdp:d2")
            assert pids[0] not in [info.pid for info in workers.process_infos]
            steps = [group.train_batch(global_batch(seed), loss).grad_norm for seed in (1, 2)]
            assert steps == pytest.approx(expected, rel=1e-5)


@pytest.mark.timeout(240)
def test_process_that_dies_between_calls(cluster: Any) -> None:
    """Without a call, and without another one that the driver would make to ask."""
    with RayWorkers(2, environment=ENVIRONMENT) as workers, ending(workers) as pids:
        run(workers, functions.rank_and_size)
        assert workers.lost is None
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: workers.lost is not None, "the loss is noticed", PROMPTLY)
        assert re.match(rf"rank 1 \(pid {pids[1]} on node .*\) died between calls", str(workers.lost))
        with pytest.raises(WorkerLostError, match="died between calls"):
            run(workers, functions.rank_and_size)


@pytest.mark.timeout(240)
def test_two_groups_that_start_at_once_and_hang(cluster: Any) -> None:
    resources: list[dict[str, float]] = [{"CPU": 1}, {"chip": 2}]
    with ThreadPoolExecutor(2) as threads:
        idle, stopped = threads.map(
            lambda its: RayWorkers(1, resources=its, hang_seconds=3, environment=ENVIRONMENT), resources
        )
    ports = [run(workers, functions.environment)[0]["MASTER_PORT"] for workers in (idle, stopped)]
    assert len(set(ports)) == 2
    assert [run(workers, functions.all_reduce, [2.0]) for workers in (idle, stopped)] == [[2.0], [2.0]]

    # A process that answers but does not move.
    with ending(idle):
        message = r"(?s)rank 0 .* has not moved for 3 s.*functions.py.*in oversleep.*time\.sleep\(600\)"
        with promptly(), pytest.raises(WorkerLostError, match=message):
            run(idle, functions.oversleep, [0], "train_batch")

    # A process that does not answer.
    with ending(stopped) as pids:
        os.kill(pids[0], signal.SIGSTOP)
        with promptly(), pytest.raises(WorkerLostError, match=r"rank 0 .* has not answered for 3 s") as raised:
            run(stopped, functions.all_reduce, [1.0])
        assert raised.value.pid == pids[0]
