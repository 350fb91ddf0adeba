"""Models of two processes and a rollout of the driver take turns on devices that cannot hold all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from areal.api import FinetuneSpec, TrainEngine
from areal.dispatch import SharedDevices, WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.executor import RankObjects, Reply, Work
from areal.dispatch.ray import RayWorkers
from areal.dispatch.shared_devices import Kind, Part, devices
from areal.tests.dist.dispatch.shared import KINDS, OneByOne, numbers
from areal.tests.dist.trainer.ppo_runs import CRITIC, OPTIMIZER
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import EPISODE, Curve, Played, Prompts
from areal.tests.harness.tiny import config, global_batch, loss
from areal.trainer.estimators import CriticBased
from areal.trainer.losses import ppo_objective, value_objective
from areal.trainer.ppo import Critic, PPOTrainer
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner

SPEC = FinetuneSpec(total_train_steps=1000)
PLAN = Plan(groups=3, group_size=2, seed=11)
DEVICES = ("gpu0", "gpu1")
"""Devices of ranks 0 and 1. The rollout is on the first device."""


def measured(rank_objects: RankObjects, argument: tuple[Work, Any]) -> tuple[Any, list[int]]:
    """Do a call's work. Returns its value, and the bytes that the engines of this rank had on the device before and after."""
    work, inner = argument
    before = on_device(rank_objects)
    value = work(rank_objects, inner)
    return value, [before, on_device(rank_objects)]


def on_device(rank_objects: RankObjects) -> int:
    engines = [value for value in rank_objects.by_name.values() if isinstance(value, TrainEngine)]
    return sum(engine.memory()[0].on_device for engine in engines)


class Watched:
    """Measures the bytes on each device at each call of some workers.

    Attributes:
        most: bytes of the models of each rank at most, and with the rollout where it is awake.
    """

    def __init__(self, workers: RayWorkers) -> None:
        self._workers, self.size = workers, workers.size
        self.rollout: Any = None
        self.awake_bytes = 0
        self.most = [0] * self.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def start(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        awake = 0 if self.rollout is None or self.rollout.asleep else self.awake_bytes
        outer: Future[list[Reply]] = Future()

        def finish(inner: Future[list[Reply]]) -> None:
            if inner.exception() is not None:
                outer.set_exception(inner.exception())
                return
            replies = [self._opened(rank, reply, awake) for rank, reply in enumerate(inner.result())]
            outer.set_result(replies)

        pairs = [(work, argument) for argument in arguments]
        self._workers.start(what, measured, pairs).add_done_callback(finish)
        return outer

    def _opened(self, rank: int, reply: Reply, awake: int) -> Reply:
        if reply.kind:
            return reply
        value, nbytes = reply.value
        if self.rollout is not None:
            self.most[rank] = max(self.most[rank], max(nbytes) + (awake if rank == 0 else 0))
        return Reply(value)


@contextmanager
def groups(workers: Any, **changes: dict[str, Any]) -> Iterator[dict[str, WorkerGroup]]:
    with ExitStack() as stack:
        made = {}
        for name, change in changes.items():
            settings = config("fsdp:d2", **{"path": model_dir("qwen3"), "optimizer": OPTIMIZER, **change})
            made[name] = stack.enter_context(WorkerGroup(settings, workers, name=name))
            made[name].initialize(SPEC)
        yield made


def totals(group: TrainEngine) -> list[int]:
    """Return the bytes of all state, by rank."""
    return [
        memory.on_device + memory.offloaded + memory.grads.missing + memory.optimizer.missing
        for memory in group.memory()
    ]


def ppo(pair: RayWorkers, limited: bool) -> tuple[Curve, Watched, int]:
    curve, workers = Curve(), Watched(pair)
    models: dict[str, dict[str, Any]] = {
        "policy": {},
        "reference": {"optimizer": None},
        "critic": {"value_head": True, "optimizer": CRITIC},
    }
    with groups(workers, **models) as made, ExitStack() as stack:
        played = Played(made["policy"].config.path, PLAN)
        stack.callback(played.close)
        local = client = played.rollout
        budget = 0
        if limited:
            # The rollout with the weights of the policy, or one model that trains.
            budget = max(
                max(map(max, map(totals, made.values()))), local.awake_bytes + made["policy"].memory()[0].params.total
            )
            shared = SharedDevices(dict.fromkeys(DEVICES, budget))
            for name, group in made.items():
                shared.add(name, group, DEVICES)
            workers.awake_bytes = local.awake_bytes
            client = shared.add_rollout("rollout", local, {"gpu0": workers.awake_bytes})
            workers.rollout = local
        runner = Runner(OneByOne(client), EPISODE, Prompts(), PLAN)
        stack.callback(runner.close)
        trainer = PPOTrainer(
            made["policy"],
            ppo_objective(),
            runner,
            lambda source, version: client.update(source.named_tensors(), version),
            estimator=CriticBased(kl_coef=0.02),
            reference=made["reference"],
            critic=Critic(made["critic"], value_objective()),
            tracker=curve,
        )

        def check(_: Any) -> None:
            if limited:
                shared.settle()
                for name, group in made.items():
                    assert_agrees(shared, name, group)

        trainer.train(3, after_step=check)
        return curve, workers, budget


def assert_agrees(shared: SharedDevices, name: str, group: TrainEngine) -> None:
    """Compare each kind of state on each device with the placement, to the byte."""
    for device, memory in zip(DEVICES, group.memory(), strict=True):
        for kind, attribute in KINDS.items():
            part = Part(name, kind)
            planned = shared.placement.sizes(part)[device] if shared.placement.is_on_device(part) else 0
            assert getattr(memory, attribute).on_device == planned, (part, device)


@pytest.mark.timeout(580)
def test_ppo_has_the_bits_of_a_run_without_a_budget(pair: RayWorkers) -> None:
    expected, _, _ = ppo(pair, False)
    with mock.patch.object(devices.logger, "warning") as log:
        actual, workers, budget = ppo(pair, True)
        assert not log.called, log.call_args
    assert numbers(actual) == numbers(expected)
    assert all(0 < most <= budget for most in workers.most)


@pytest.mark.timeout(280)
def test_calls_of_several_threads_take_turns_until_a_process_dies(cluster: Any) -> None:
    """Futures hold their uses on the ranks; after the loss of a process others go on, and the group after its restart."""
    environment = {"OMP_NUM_THREADS": "1"}
    with (
        RayWorkers(2, environment=environment) as workers,
        RayWorkers(1, resources={"chip": 1}, environment=environment) as others,
        ExitStack() as stack,
    ):
        made: dict[str, WorkerGroup] = {}
        for name, executor, backend in (
            ("policy", workers, "fsdp:d2"),
            ("other", workers, "fsdp:d2"),
            ("far", others, "fsdp:d1"),
        ):
            made[name] = stack.enter_context(WorkerGroup(config(backend), executor, name=name))
            made[name].initialize(SPEC)
        # Either one of the larger models, or both of the smaller ones.
        shared = SharedDevices(dict.fromkeys(DEVICES, max(totals(made["far"]))))
        for name, group in made.items():
            shared.add(name, group, DEVICES[: group.dims.world_size])
        expected = {name: group.forward_batch(global_batch()) for name, group in made.items()}

        def call(number: int) -> bool:
            name = list(made)[number % 3]
            pending = made[name].start(TrainEngine.forward_batch, global_batch())
            made[list(made)[(number + 1) % 3]].eval_batch(global_batch(), loss)
            return all(torch.equal(a, b) for a, b in zip(pending.result(60), expected[name], strict=True))

        with ThreadPoolExecutor(3) as threads:
            assert all(threads.map(call, range(12)))

        # The use of a call ends on the ranks, without a wait for its result.
        made["policy"].start(TrainEngine.train_batch, global_batch(), loss)
        made["far"].train_batch(global_batch(), loss)
        made["policy"].onload()
        os.kill(workers.process_infos[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            made["policy"].train_batch(global_batch(), loss)
        # Its memory is free. Nothing is offloaded, and nothing waits.
        made["far"].train_batch(global_batch(), loss)
        shared.settle(["policy", "other"])
        assert shared.placement.bytes_on_device("gpu1") == 0
        made["policy"].restart()
        made["policy"].train_batch(global_batch(), loss)
        made["other"].restart()
        made["far"].train_batch(global_batch(), loss)
        shared.settle()
        assert all(shared.placement.free(device) >= 0 for device in DEVICES)
        assert not shared.placement.is_on_device(Part("policy", Kind.OPTIMIZER))
