"""The components of an engine that trains adapters instead of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from areal.api.config import TrainEngineConfig
from areal.engine.checkpoint.checkpointer import RunInfo
from areal.engine.components import EngineComponents
from areal.engine.lora.adapter_set import AdapterSet, SelectedOptimizer
from areal.engine.lora.checkpoint import AdapterCheckpointer
from areal.engine.lora.weights import AdaptedWeights, ModelWeights
from areal.engine.optimizer import GradientState
from areal.utils.distributed import ControlPlane


class Engine(RunInfo, Protocol):
    """The attributes of an engine that its adapters need."""

    config: TrainEngineConfig
    control: ControlPlane


class SelectedGradients:
    """The gradients of the selected adapter. Implements :class:`areal.engine.components.Gradients`."""

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters

    @property
    def state(self) -> GradientState:
        return self._adapters.current.pending

    def before_backward(self) -> None:
        self._adapters.current.before_backward()

    def zero(self) -> None:
        self._adapters.zero_grad()


def with_adapters(
    components: EngineComponents, weights: ModelWeights, adapters: AdapterSet, engine: Engine
) -> EngineComponents:
    """Replace the optimizer, the checkpointer, the weights and the gradients by those of adapters.

    Args:
        components: components of an engine whose model is not trained.
        weights: weights of that model.
    """
    config, adapted = engine.config, AdaptedWeights(weights, adapters, engine.control)
    trained = config.optimizer is not None
    return replace(
        components,
        optimizer=SelectedOptimizer(adapters) if trained else None,
        checkpointer=AdapterCheckpointer(adapters, adapted, engine, engine.control, config.path, trained),
        weights=adapted,
        gradients=SelectedGradients(adapters),
        adapters=adapters,
    )
