"""Answers with a long tail: 16 groups of 8, and a step that takes two mean answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from areal.inference.protocol import Completion, Sampling
from areal.tests.unit.rollout.runs import Client
from areal.trainer.rollout.plan import Group, Plan

TRAINING = 2.0
"""Seconds of a step. An answer takes one on average."""

NEVER = 1e9


async def reward(item: int, answer: Completion) -> float:
    """On the event loop: a thread would take time of another clock."""
    return 1.0


class Slow(Client):
    """Answers of four tokens, each with the version at its time, after a log-normal time of mean 1 that depends on the seed."""

    def __init__(self, endless: int | None = None, mean: float = 1.0) -> None:
        super().__init__()
        self.version, self.endless, self.mean = 0, endless, mean
        self.cancelled: list[int] = []

    def sync(self, version: int) -> None:
        self.version = version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        item, seed = prompt_ids[0], sampling.seed
        assert seed is not None
        seconds = self.mean * random.Random(seed).lognormvariate(-0.5, 1.0)
        versions = []
        try:
            for _ in range(4):
                await asyncio.sleep(NEVER if item == self.endless else seconds / 4)
                versions.append(self.version)
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        return Completion((item, seed, 1, 2), (-1.0,) * 4, tuple(versions), "stop")


def plan(**changes: Any) -> Plan:
    fields = {"groups": 16, "group_size": 8, "max_staleness": 2, "max_concurrent": 1000, "shuffle": False, "seed": 1}
    return Plan(**fields | {"in_order": False} | changes)


def oldest(group: Group) -> int:
    return min(sequence.oldest_version(NEVER) for sequence in group.sequences)  # type: ignore[arg-type]
