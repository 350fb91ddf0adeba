"""Ranks of one trainer as threads of this process, whose clocks go together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from areal.tests.unit.rollout.long_tail import Slow, reward
from areal.tests.unit.rollout.runs import episode
from areal.tests.unit.rollout.virtual_time import train, virtual_runner
from areal.trainer.rollout import exchange as exchanges
from areal.trainer.rollout.exchange import RolloutExchange, set_runner_state
from areal.trainer.rollout.plan import Group, Plan
from areal.trainer.rollout.runner import Runner

SECONDS = 120.0
"""Time limit of a rank that waits for the others."""


class World:
    """Values and tensors that ranks exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size
        self.sent: dict[tuple[int, int], Tensor] = {}


class ThreadControl:
    """Control plane of one rank of a :class:`World`."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.size, self._world = rank, world.size, world

    def gather(self, value: Any) -> list[Any]:
        self._world.values[self.rank] = value
        self._world.barrier.wait(SECONDS)
        values = list(self._world.values)
        self._world.barrier.wait(SECONDS)
        return values

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        self._world.sent.update({(self.rank, rank): tensor for tensor, rank in sends})
        self._world.barrier.wait(SECONDS)
        for tensor, rank in receives:
            tensor.copy_(self._world.sent.pop((rank, self.rank)))
        self._world.barrier.wait(SECONDS)

    def close(self) -> None:
        """Nothing is open. Called if another test of the process has initialized torch.distributed."""


@dataclass
class Run:
    """Results of the ranks of a run.

    Attributes:
        idle: fraction of the time in which the trainer waits.
        batches: for each step, the groups of each rank.
        states: states of the runners during the last step, while groups run.
    """

    idle: list[float] = field(default_factory=list)
    batches: list[list[list[Group]]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)


def on_ranks(
    clients: Sequence[Any], plan: Plan, fn: Callable[[int, Runner, RolloutExchange], Any], **options: Any
) -> list[Any]:
    """Call a function in a thread of each rank, with its runner and exchange, and return the results."""
    world, here = World(len(clients)), threading.local()

    def call(rank: int) -> Any:
        here.control = ThreadControl(world, rank)
        try:
            with closing(virtual_runner(clients[rank], episode(reward), range(100_000), plan, **options)) as runner:
                return fn(rank, runner, RolloutExchange(runner, rank))
        except BaseException:
            world.barrier.abort()
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world.size) as pool:
        patch.setattr(exchanges, "ControlPlane", lambda alone: here.control)
        return [future.result() for future in [pool.submit(call, rank) for rank in range(world.size)]]


def train_on_ranks(
    clients: Sequence[Slow], plan: Plan, steps: range, seconds: float, states: list[dict[str, Any]] | None = None
) -> Run:
    """Train on batches of all ranks, which begin each step together.

    Args:
        clients: one for each rank.
        plan: plan of all ranks.
        steps: numbers of the batches.
        seconds: time of a step.
        states: of a run that goes on.
    """
    run = Run(batches=[[[] for _ in clients] for _ in steps])

    def work(rank: int, runner: Runner, exchange: RolloutExchange) -> float:
        def each(step: int, groups: list[Group]) -> None:
            run.batches[step - steps.start][rank] = groups

        def sync(version: int) -> None:
            clients[rank].sync(version)
            if version == steps.stop:
                runner.advance(version)
                run.states = exchange.runner_state()

        if states is not None:
            set_runner_state(runner, states)
        return train(runner, steps, seconds, each, sync, exchange.next_groups)

    run.idle = on_ranks(clients, plan, work)
    return run
