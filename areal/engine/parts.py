"""What an engine is composed of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from areal.api.batch import OptimStats
from areal.api.checkpoint import Checkpointer
from areal.api.weights import WeightSource
from areal.engine.context_parallel import ContextParallel
from areal.engine.schedule import Schedule


class StepOptimizer(Protocol):
    """Clips and applies gradients, and owns the learning-rate schedule."""

    @property
    def lr(self) -> float: ...

    def step(self) -> OptimStats: ...

    def set_lr(self, lr: float) -> None: ...


class Memory(Protocol):
    """Moves an engine's tensors to host memory and back, bit for bit."""

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None: ...

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> None: ...


@dataclass(frozen=True)
class EngineParts:
    """What an engine is composed of.

    ``zero_grad`` discards pending gradients; ``vocab_size`` bounds token ids. ``recover`` brings a model that failed halfway through a
    micro-batch back to rest, or answers False where it cannot; a plain module has nothing to bring back.
    """

    model: nn.Module
    schedule: Schedule
    context_parallel: ContextParallel
    optimizer: StepOptimizer | None
    checkpointer: Checkpointer
    weights: WeightSource
    memory: Memory
    zero_grad: Callable[[], None]
    vocab_size: int
    recover: Callable[[], bool] = lambda: True

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off; the mode is restored."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)
