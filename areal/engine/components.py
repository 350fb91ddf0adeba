"""The components of an engine, and the protocols that they implement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch

from areal.api.adapters import Adapters
from areal.api.batch import OptimStats
from areal.api.checkpoint import Checkpointer
from areal.api.memory import EngineMemory
from areal.api.step_settings import StepSettings
from areal.api.weights import WeightSource
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.moe.routing import ExpertRouting, no_experts
from areal.engine.optimizer import GradientState
from areal.engine.schedule import Schedule
from areal.utils.data.images import ImageRules


class Model(Protocol):
    """A model with a mode: a torch module, or the arrays of another runtime."""

    training: bool

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...


class StepOptimizer(Protocol):
    """Clips and applies gradients, and owns the learning-rate schedule."""

    @property
    def lr(self) -> float: ...

    def step(self, settings: StepSettings | None = None) -> OptimStats: ...

    def set_lr(self, lr: float) -> None: ...


class Gradients(Protocol):
    """The gradients of what is trained, between optimizer steps."""

    @property
    def state(self) -> GradientState:
        """Progress of the accumulation.

        Raises:
            RuntimeError: nothing is trained, inside ``reference()``.
        """
        ...

    def before_backward(self) -> None:
        """Prepare for accumulation, before each call with a backward.

        After a reduction, keep each reduced gradient on one rank only, so that the next reduction does not count it twice.
        """
        ...

    def zero(self) -> None:
        """Discard the gradients, also those in host memory."""
        ...


class CallGradients(Protocol):
    """The gradients that a call with a backward adds.

    Attributes:
        on_error: text for an error of the call: what :meth:`undo` does.
    """

    on_error: str

    def begin(self) -> None:
        """Prepare for accumulation, before the first backward."""
        ...

    def added(self) -> None:
        """Record that the call has added its gradients."""
        ...

    def undo(self) -> None:
        """Leave no part of the call's gradients, after an error. May be called twice."""
        ...

    def end(self) -> None:
        """Release what :meth:`undo` needs: no error of the call can follow."""
        ...


class Memory(Protocol):
    """Moves an engine's tensors to host memory and back, bit for bit, and counts their bytes."""

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Move tensors out. Returns the bytes that were freed."""
        ...

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Bring tensors back. Returns the bytes that were moved."""
        ...

    def report(self, device: torch.device) -> EngineMemory:
        """Return the bytes of the tensors by kind, on ``device`` and elsewhere, without synchronizing."""
        ...


class TrainedAdapters(Adapters, Protocol):
    """Adapters that are trained instead of the model, as far as the template needs them."""

    def sum_gradients(self) -> None:
        """Sum the gradients of the selected adapter over ranks. Collective."""
        ...

    def require(self, names: Sequence[str]) -> None:
        """Check that there are adapters with these names.

        Raises:
            ValueError: there is no such adapter.
        """
        ...

    def memory(self, device: torch.device) -> EngineMemory:
        """Return the bytes of the adapters on ``device``, where they stay."""
        ...

    def gradients_of(self, names: Sequence[str]) -> CallGradients:
        """Return the gradients that a call adds to these adapters.

        Raises:
            RuntimeError: nothing is trained, inside ``reference()``.
        """
        ...

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Disable the adapters inside: the model computes without them."""
        ...


@dataclass
class EngineComponents:
    """The components of an engine. :meth:`close` releases them.

    Attributes:
        model: root module, or the modules of this rank's pipeline stages. Only the engine that built it looks inside.
        schedule: owner of the micro-batch loop.
        context_parallel: split of a micro-batch's tokens over ranks.
        optimizer: ``None`` for an engine that only evaluates.
        checkpointer: saves and loads the engine.
        weights: source of full weights and gradients.
        memory: moves tensors to host memory.
        gradients: of what is trained, the model or its adapters.
        vocab_size: upper bound of token ids.
        max_positions: length of the sequences for which the model was made, in tokens; ``None`` if unknown.
        fixed_positions: whether positions are learned, so that longer sequences cannot be computed.
        media_tokens: token ids that stand for an image, a video or sound that the engine does not take.
        images: images that the model takes; ``None`` if it is trained on text alone.
        streams: packed streams of a micro-batch that this process computes, each within the budget of a micro-batch.
        rows: whether the model runs one sequence per row instead of packed sequences.
        token_multiple: divisor of each context-parallel rank's tokens: the ranks over which sequence parallelism splits them again, times the
            rows that products need at once.
        routing: balancing losses, replay and load of experts.
        adapters: low-rank adapters, which are trained instead of the model.
        applied: lines for the log, such as ``"sharding"`` and ``"attention kernel"``, by their names.
        n_parameters, n_local_parameters: parameters of the whole model, and those that this rank holds, for the log.
    """

    model: Model
    schedule: Schedule
    context_parallel: ContextParallel
    optimizer: StepOptimizer | None
    checkpointer: Checkpointer
    weights: WeightSource
    memory: Memory
    gradients: Gradients
    vocab_size: int
    max_positions: int | None = None
    fixed_positions: bool = False
    media_tokens: frozenset[int] = frozenset()
    images: ImageRules | None = None
    streams: int = 1
    rows: bool = False
    token_multiple: int = 1
    routing: ExpertRouting = field(default_factory=no_experts)
    adapters: TrainedAdapters | None = None
    applied: Mapping[str, str] = field(default_factory=dict)
    n_parameters: int | None = None
    n_local_parameters: int | None = None
    closed: bool = field(default=False, init=False)

    @property
    def align(self) -> int:
        """Divisor of the padded length of every micro-batch."""
        return self.context_parallel.align * self.token_multiple

    @property
    def may_share(self) -> bool:
        """Whether the model can compute common prefixes once: each of its layers passes what it knows of a token to several others."""
        recurrence = self.context_parallel.recurrence
        return not self.rows and (recurrence is None or not recurrence.whole_runs)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode inside, and restore its mode."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            # A fault inside may have closed the engine.
            if not self.closed:
                self.model.train(training)

    def close(self) -> None:
        """Release every component, and with them the process groups that they use.

        The connections of a process group close with the last reference to it. A fault closes an engine while the frames of the failing call
        still refer to this object, to the schedule and to the routing, so that none of these may keep a reference.
        """
        self.schedule.close()
        self.routing.close()
        for component in fields(self):
            if component.name != "closed":
                delattr(self, component.name)
        self.closed = True


class AllGradients:
    """The gradients of what is trained. An error discards all that are pending.

    Implements :class:`CallGradients`.
    """

    on_error = "all pending gradients were discarded; the engine can be used for the next call"

    def __init__(self, gradients: Gradients) -> None:
        self._gradients, self._state = gradients, gradients.state

    def begin(self) -> None:
        self._gradients.before_backward()
        # A reduction that was complete is not any more, even if the call is interrupted.
        self._state.set(accumulated=self._state.accumulated)

    def added(self) -> None:
        self._state.set(accumulated=True)

    def undo(self) -> None:
        self._gradients.zero()
        self._state.set(accumulated=False)

    def end(self) -> None:
        pass


def call_gradients(components: EngineComponents, adapters: tuple[str, ...] | None) -> CallGradients:
    """Return the gradients that a call adds: those of the adapters that its samples name, or of what is trained.

    Raises:
        RuntimeError: nothing is trained, inside ``reference()``.
        ValueError: called inside ``torch.inference_mode()``.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "inside torch.inference_mode() no gradient can be computed: train outside of it; forward_batch and eval_batch may be called inside"
        )
    if adapters is None or components.adapters is None:
        return AllGradients(components.gradients)
    return components.adapters.gradients_of(adapters)
