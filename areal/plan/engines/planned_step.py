"""A training step of an engine on the meta device, and what a plan asks of the engine."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from areal.api import FinetuneSpec, MicroBatch, MicroBatchList, TokenOutputs, TrainEngineConfig
from areal.engine.base import BaseTrainEngine
from areal.engine.components import EngineComponents, call_gradients
from areal.engine.faults import Faults
from areal.engine.lora.adapter import Adapter
from areal.plan.planned_world import planned_world
from areal.plan.step_recorder import StepRecorder


class NotPlannedError(ValueError):
    """An option that a plan does not support.

    Args:
        option: name of the field.
        value: its value.
        way_out: what to do instead.
    """

    def __init__(self, option: str, value: object, way_out: str = "leave it out to plan the rest") -> None:
        super().__init__(f"{option} = {value!r}: a plan does not support it; {way_out}")


class PlannedStep(BaseTrainEngine):
    """An engine in :func:`~areal.plan.planned_world.planned_world`.

    Args:
        config: configuration of the engine. The weights at ``path`` are not read.
        memory: bytes of a rank's device.
    """

    def __init__(self, config: TrainEngineConfig, memory: int) -> None:
        super().__init__(config)
        self._memory = memory
        self._adapter: Adapter | None = None

    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        # Choices by memory are those on the device to plan for.
        self._device_memory = self._memory
        components: Any = super()._build(spec)  # type: ignore[safe-super]
        if components.adapters is not None:
            self._adapter = components.adapters.current
            if components.optimizer is not None:
                without_update(components.adapters.current.optimizer.inner)
        return components  # type: ignore[no-any-return]

    @property
    def factors(self) -> list[nn.Parameter]:
        """The factors of the adapter that is trained; none if the model is."""
        return [] if self._adapter is None else self._adapter.parameters

    @property
    @abstractmethod
    def head_rows(self) -> int:
        """Rows of the output head on this rank; 0 without a head."""

    @property
    def experts_per_token(self) -> int:
        """Experts of a token if a mask selects them; 0 for an engine without such masks."""
        return 0

    @abstractmethod
    def warm_up(self, mbs: MicroBatchList) -> None:
        """Run what only the first step runs, so that the next one is like all others."""

    @abstractmethod
    def watch(self, recorder: StepRecorder) -> None:
        """Tell a recorder which tensors are not activations. In place."""

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds between steps after the first: of parameters, gradients and optimizer state."""

    @abstractmethod
    def update_bytes(self) -> int:
        """Return the bytes that the update of a step reads and writes. 0 without an optimizer."""

    def run_step(self, mbs: MicroBatchList) -> None:
        """Run what ``train_batch`` runs on tensors: forward, backward and the reduction of all micro-batches, and the optimizer step."""

        def process(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, None]:
            logprobs: Any = outputs.logprobs
            return -logprobs.sum(), None

        components = self._require_components()
        gradients = call_gradients(components, None)
        gradients.begin()
        faults = Faults()
        with components.schedule.last_call():
            self._run_schedule(mbs, process, ("logprobs",), False, faults)
        if faults.first is not None:
            raise faults.first
        gradients.added()
        if components.optimizer is not None:
            self._apply_gradients()
        else:
            self._reduced_components()
            self.zero_grad()


PlannedT = TypeVar("PlannedT", bound=PlannedStep)


@contextlib.contextmanager
def planned_engine(
    make: Callable[[TrainEngineConfig, int], PlannedT], config: TrainEngineConfig, memory: int, rank: int
) -> Iterator[PlannedT]:
    """Context with an initialized engine on the meta device, as a rank of its layout.

    Args:
        make: class of the engine.
        config: configuration of the engine.
        memory: bytes of a rank's device.
        rank: the rank.

    Raises:
        ValueError: the engine refuses the layout, or the plan an option.
        RuntimeError: the process is a rank of another world.
    """
    with planned_world(rank, config.dims.world_size):
        engine = make(config, memory)
        engine.initialize(FinetuneSpec(total_train_steps=1))
        with engine:
            yield engine


def without_update(optimizer: Any) -> Any:
    """Return an optimizer whose update does nothing: there are no values. The plan adds its cost. In place."""
    optimizer.step = nothing
    return optimizer


def nothing(*args: Any, **options: Any) -> None:
    """Do nothing."""
