"""Models that share devices: fakes, and their bytes by kind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import torch

from areal.api import TrainEngine
from areal.dispatch.shared_devices import Kind, Part, SharedDevices
from areal.inference.protocol import Completion, RolloutClient, Sampling
from areal.tests.dist.dispatch.trainer_runs import TIMES
from areal.tests.harness.rl import Curve
from areal.tests.harness.tiny import (
    global_batch,
)

KINDS = {Kind.WEIGHTS: "params", Kind.GRADIENTS: "grads", Kind.OPTIMIZER: "optimizer"}


class FakeRollout:
    """A rollout that only counts."""

    def __init__(self) -> None:
        self.asleep = False
        self.calls: list[str] = []

    def sleep(self) -> None:
        self.asleep = True
        self.calls.append("sleep")

    def wake(self) -> None:
        self.asleep = False
        self.calls.append("wake")


def state_bytes(engine: TrainEngine) -> int:
    (memory,) = engine.memory()
    return memory.params.total + memory.grads.total + memory.optimizer.total


def assert_agrees(shared: SharedDevices, engines: dict[str, TrainEngine]) -> None:
    """Compare every part of every engine with the placement, to the byte."""
    for name, engine in engines.items():
        (memory,) = engine.memory()
        for kind, attribute in KINDS.items():
            part = Part(name, kind)
            planned = sum(shared.placement.sizes(part).values()) if shared.placement.is_on_device(part) else 0
            assert getattr(memory, attribute).on_device == planned, part
        assert shared.placement.bytes_on_device("gpu", name) == memory.on_device


def samples(vocab: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return a batch that all three models know."""
    return [{**sample, "input_ids": sample["input_ids"] % vocab} for sample in global_batch()]


class OneByOne:
    """Client that computes one answer at a time: its bits do not depend on the time at which others come."""

    def __init__(self, client: RolloutClient) -> None:
        self._client, self._lock = client, asyncio.Lock()

    @property
    def version(self) -> int:
        return self._client.version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        async with self._lock:
            return await self._client.generate(prompt_ids, sampling)


def numbers(curve: Curve) -> list[dict[str, float]]:
    """Return the numbers of each step without times and moves."""
    # The engine itself had to move nothing.
    assert not any(value for step in curve.steps for name, value in step.items() if name.endswith("/onloaded_bytes"))
    left_out = re.compile(f"{TIMES.pattern}|/offloaded_bytes|/onloaded_bytes")
    return [{name: value for name, value in step.items() if not left_out.search(name)} for step in curve.steps]
