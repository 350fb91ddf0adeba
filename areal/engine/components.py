"""What an engine is composed of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from areal.api.batch import OptimStats
from areal.api.checkpoint import Checkpointer
from areal.api.weights import WeightSource
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.moe.routing import ExpertRouting, no_experts
from areal.engine.optimizer import GradientState
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

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int: ...


@dataclass(frozen=True)
class EngineComponents:
    """What an engine is composed of.

    ``zero_grad`` discards pending gradients; ``vocab_size`` bounds token ids. ``recover`` brings a model that failed halfway through a
    micro-batch back to rest, or answers False where it cannot; a plain module has nothing to bring back. Each rank's tokens are
    ``token_split`` times split once more, by sequence parallelism. Inside ``last_call()`` the optimizer step follows the next call.
    ``before_backward`` comes before every call that adds gradients.
    ``routing`` is for the experts of a model that has some. ``adapters``, where there are some, are what is trained.
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
    token_split: int = 1
    routing: ExpertRouting = field(default_factory=no_experts)
    last_call: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    before_backward: Callable[[], None] = lambda: None
    adapters: AdapterSet | None = None
    own_gradients: GradientState = field(default_factory=GradientState)

    @property
    def gradients(self) -> GradientState:
        """Of what is trained.

        Raises:
            RuntimeError: nothing is, inside ``reference()``.
        """
        return self.adapters.current.pending if self.adapters else self.own_gradients

    @property
    def align(self) -> int:
        """A micro-batch's padded length is a multiple of this."""
        return self.context_parallel.align * self.token_split

    def forget(self) -> None:
        """Hold nothing any more: those who still hold these parts then hold no process group, and its connections can close."""
        for part in (self.schedule, self.routing, self):
            vars(part).clear()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout off; the mode is restored."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            if "model" in vars(self):
                self.model.train(training)
