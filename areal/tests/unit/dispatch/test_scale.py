"""Calls on 64, 1,024 and 4,096 simulated ranks: the driver's cost grows linearly, and errors and losses are noticed at once."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError
from torch import Tensor

from areal.api import Batch, MicroBatchSpec, SaveLoadMeta, StepOutput, TokenOutputs
from areal.dispatch import WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.executor import Reply
from areal.dispatch.rank_calls import RankLayout
from areal.dispatch.ray import replies as module
from areal.dispatch.ray.results import seal
from areal.tests.harness.limits import PROMPTLY, wait_until
from areal.tests.harness.lines import counted_lines
from areal.tests.harness.tiny import config
from areal.tests.unit.dispatch.simulated import (
    VALUE,
    PromptRank,
    SilentRank,
    SimulatedRay,
    WorkingRank,
    simulated,
    simulated_ray,
)
from benchmarks.dispatch import slow_collection

__all__ = ["simulated_ray"]

RANKS = (64, 1024, 4096)
CPU_MS = 0.3
"""Milliseconds of the driver's CPU time per rank and call. What is counted here leaves Ray's own 0.15 out."""


def lines_per_rank(size: int) -> float:
    """Return the lines that the driver runs for a call, divided by the ranks."""
    with counted_lines("dispatch") as lines, simulated([PromptRank() for _ in range(size)]) as workers:
        before = lines()
        workers.watch.submit("set_lr", None, [None] * size).result()
        return (lines() - before) / size


def test_lines_of_a_call_grow_linearly(simulated_ray: SimulatedRay) -> None:
    few = lines_per_rank(RANKS[0])
    assert few < 100
    for size in RANKS[1:]:
        assert lines_per_rank(size) <= 1.2 * few


@pytest.mark.parametrize("size", RANKS)
def test_few_replies_cost_a_callback_of_ray(simulated_ray: SimulatedRay, size: int) -> None:
    """A callback costs six times as much as reading one of many values: all of them would exceed four times one ``ray.get``."""
    with simulated([PromptRank() for _ in range(size)]) as workers:
        workers.watch.submit("set_lr", None, [None] * size).result()
        assert sum(rank.replies[0].callbacks for rank in workers.ranks) <= 2 * module.WATCHED
        assert simulated_ray.read <= size


def test_cpu_time_of_a_call_is_within_the_limit_per_rank(simulated_ray: SimulatedRay) -> None:
    """It takes 0.01 ms: there is room for a machine of any load."""
    with simulated([PromptRank() for _ in range(1024)]) as workers:
        seconds = []
        for _ in range(3):
            start = time.process_time()
            workers.watch.submit("set_lr", None, [None] * 1024).result(60)
            seconds.append(time.process_time() - start)
    assert 1e3 * min(seconds) / 1024 < CPU_MS


def test_cpu_time_of_a_step_on_stored_samples_is_within_the_limit_per_rank(simulated_ray: SimulatedRay) -> None:
    """The check and division of the batch, the shards and the results of all coordinates count, too."""
    dp, tp = 128, 8
    step = seal((StepOutput(0.5, {"loss": 0.5}), {}), "the step", 2**20)
    with simulated([PromptRank(step) for _ in range(dp * tp)]) as workers:
        group = WorkerGroup(config(f"fsdp:d{dp}t{tp}", mb_spec=MicroBatchSpec(max_tokens_per_mb=2**14)), workers)
        group._calls.take_rank_layouts([RankLayout(n // tp, n % tp == 0, None) for n in range(dp * tp)])
        samples = group.put([{"input_ids": torch.arange(n), "loss_mask": torch.ones(n)} for n in range(100, 356)])
        seconds = []
        for _ in range(3):
            start = time.process_time()
            assert group.train_batch(samples, weighted_loss).loss == 0.5
            seconds.append(time.process_time() - start)
    assert 1e3 * min(seconds) / (dp * tp) < CPU_MS


def weighted_loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
    return -(outputs.logprobs * batch["loss_mask"]).sum()


@pytest.mark.parametrize(("ratio", "failure"), [(1.9, ""), (4.0, ""), (4.1, "1024 replies .* 4.1 times .* at most 4")])
def test_benchmark_names_a_slow_collection_of_replies(ratio: float, failure: str) -> None:
    assert re.search(failure, slow_collection(1024, ratio))
    assert bool(slow_collection(1024, ratio)) == bool(failure)


@pytest.mark.parametrize("size", RANKS)
def test_replies_that_come_one_by_one_are_read_once_and_asked_for_at_intervals(
    simulated_ray: SimulatedRay, size: int
) -> None:
    """In any order. Questions are bounded by the time that passes, and not by the number of replies."""
    with simulated([SilentRank() for _ in range(size)]) as workers:
        start = time.monotonic()
        call = workers.watch.submit("train_batch", None, [None] * size)
        order = random.Random(0).sample(range(size), size)
        for rank in order:
            workers.ranks[rank].replies[0].its.set_result(Reply(VALUE))
            if rank % 64 == 0:
                time.sleep(0.001)
        wait_until(call.done, "the call has ended", PROMPTLY)
        assert len(call.result(0)) == size
        seconds = time.monotonic() - start
    assert simulated_ray.read <= size
    assert simulated_ray.asked <= size + seconds / module.PAUSE_SECONDS


def test_calls_of_many_ranks_end_in_their_order(simulated_ray: SimulatedRay) -> None:
    """Ranks that are calls ahead are read together with the others."""
    with simulated([SilentRank() for _ in range(64)]) as workers:
        calls = [workers.watch.submit(f"call {n}", None, [None] * 64) for n in range(3)]
        for rank in workers.ranks[1:]:
            for reply in rank.replies:
                reply.its.set_result(Reply(VALUE))
        replies = [reply for rank in workers.ranks[1:] for reply in rank.replies]
        # Each question lets Ray report more replies, which need not be read.
        wait_until(
            lambda: simulated_ray.read >= sum(not reply.callbacks for reply in replies),
            "the replies are read",
            PROMPTLY,
        )
        assert not any(call.done() for call in calls)
        for n, call in enumerate(calls):
            workers.ranks[0].replies[n].its.set_result(Reply(VALUE))
            wait_until(call.done, "the call has ended", PROMPTLY)
            assert len(call.result(0)) == 64
            assert not any(later.done() for later in calls[n + 1 :])


def test_replies_are_read_while_an_earlier_call_waits_for_the_same_rank_as_the_one_before(
    simulated_ray: SimulatedRay,
) -> None:
    """Nothing is asked for in the second call then."""
    with simulated([SilentRank() for _ in range(64)]) as workers:
        for n in range(3):
            workers.watch.submit(f"call {n}", None, [None] * 64)
        earlier = [reply for rank in workers.ranks[1:] for reply in rank.replies[:2]]
        for reply in earlier:
            reply.its.set_result(Reply(VALUE))
        wait_until(
            lambda: simulated_ray.read >= sum(not reply.callbacks for reply in earlier),
            "the replies to two calls are read",
            PROMPTLY,
        )
        before, last = simulated_ray.read, workers.ranks[50].replies[2]
        assert not last.callbacks
        last.its.set_result(Reply(VALUE))
        wait_until(lambda: simulated_ray.read > before, "the reply to the third call is read", PROMPTLY)
        for n in range(3):
            workers.ranks[0].replies[n].its.set_result(Reply(VALUE))


def test_error_of_one_rank_of_many_shortens_the_wait_for_the_others(simulated_ray: SimulatedRay) -> None:
    """Also in a later call than that in which the others are."""
    with simulated([SilentRank() for _ in range(1024)], grace_seconds=0.3) as workers:
        first, second = (workers.watch.submit(what, None, [None] * 1024) for what in ("set_lr", "train_batch"))
        wait_until(lambda: simulated_ray.asked > 0, "replies were asked for")
        time.sleep(2 * module.ASK_SECONDS)
        late = workers.ranks[700].replies
        late[0].its.set_result(Reply(VALUE))
        late[1].its.set_result(Reply(None, "ValueError", "too long"))
        wait_until(lambda: first.done() and second.done(), "the calls have ended", PROMPTLY)
        with pytest.raises(WorkerLostError, match=r"rank 0 .*has not (moved|answered) for 0.3 s"):
            first.result(0)
        with pytest.raises(ValueError, match=r"(?s)rank 700: too long\nAnd: rank 0 "):
            second.result(0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_lost_process_is_named_from_its_reply_and_errors_of_others_are_kept(
    simulated_ray: SimulatedRay, ahead: int
) -> None:
    """The replies that arrive with it are read, also that of a rank which is a call ahead."""
    with simulated([SilentRank() for _ in range(1024)]) as workers:
        calls = [workers.watch.submit(f"call {n}", None, [None] * 1024) for n in range(2)]
        if ahead:
            workers.ranks[900].replies[0].its.set_result(Reply(VALUE))
        lost = Reply(None, "RankLostError", "connection closed by rank 800")
        workers.ranks[900].replies[ahead].its.set_result(lost)
        workers.ranks[800].replies[0].its.set_exception(RayActorError())
        wait_until(calls[1].done, "the calls have ended", PROMPTLY)
        message = r"(?s)rank 800 \(pid 900 .* died during call 0.*And: rank 900: connection closed by rank 800"
        with pytest.raises(WorkerLostError, match=message):
            calls[ahead].result(0)
        assert workers.ended == ["rank 800"]


def test_object_that_is_not_there_yet_is_asked_for_again(
    simulated_ray: SimulatedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may report an object whose node is gone."""
    refused = {1: 2}
    right = simulated_ray.get

    def get(refs: Any, timeout: float | None = None) -> Any:
        value = right(refs, timeout)
        if isinstance(refs, list) and refused[1]:
            refused[1] -= 1
            raise module.GetTimeoutError
        return value

    monkeypatch.setattr(module.ray, "get", get)
    with simulated([PromptRank() for _ in range(64)]) as workers:
        call = workers.watch.submit("set_lr", None, [None] * 64)
        wait_until(call.done, "the call has ended", PROMPTLY)
        assert len(call.result(0)) == 64


def test_end_without_ray_asks_for_nothing(simulated_ray: SimulatedRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question would start another cluster."""
    with simulated([SilentRank() for _ in range(64)]) as workers:
        call = workers.watch.submit("train_batch", None, [None] * 64)
        wait_until(lambda: simulated_ray.asked > 0, "replies were asked for")
        monkeypatch.setattr(module.ray, "is_initialized", lambda: False)
        time.sleep(2 * module.ASK_SECONDS)
        before = simulated_ray.asked
        workers.close()
        assert simulated_ray.asked == before
        with pytest.raises(RuntimeError, match="closed"):
            call.result(1)


class SavingEngine:
    """An engine that remembers what it saves."""

    is_main, dp_rank = True, 0

    def __init__(self) -> None:
        self.saved: list[SaveLoadMeta] = []

    def save(self, meta: SaveLoadMeta) -> None:
        self.saved.append(meta)

    def destroy(self) -> None:
        pass


class Counter:
    """An object of the driver with ``kib`` KiB of state."""

    def __init__(self, kib: int) -> None:
        self.state = {"counts": bytes(range(256)) * 4 * kib}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("kib", [40, 2048])
def test_state_of_the_driver_travels_once(simulated_ray: SimulatedRay, tmp_path: Path, kib: int) -> None:
    """With a checkpoint of 64 ranks: the bytes of one state, and at most 2 KiB for each rank."""
    size, state = 64, Counter(kib).state_dict()
    ranks = [WorkingRank(rank, size, simulated_ray) for rank in range(size)]
    engines = [SavingEngine() for _ in ranks]
    for rank, engine in zip(ranks, engines, strict=True):
        rank.objects.by_name["engine"] = engine
    with simulated(ranks) as workers:
        group = WorkerGroup(config(f"fsdp:d{size}"), workers)
        group._calls.take_rank_layouts([RankLayout(rank, True, None) for rank in range(size)])
        group.save(SaveLoadMeta(tmp_path / "other", weight_format="dcp"))  # checks the folder
        before = simulated_ray.stored + simulated_ray.sent
        group.save(SaveLoadMeta(tmp_path / "step", weight_format="dcp", stateful={"counter": Counter(kib)}))
        sent = simulated_ray.stored + simulated_ray.sent - before
    assert sent <= len(cloudpickle.dumps(state)) + size * 2048
    assert all(engine.saved[1].stateful["counter"].state_dict() == state for engine in engines)
