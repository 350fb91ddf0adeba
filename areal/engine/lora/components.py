"""An engine's parts, once adapters are trained instead of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from areal.api.config import TrainEngineConfig
from areal.engine.checkpoint.checkpointer import RunInfo
from areal.engine.components import EngineComponents
from areal.engine.lora.adapter_set import AdapterSet, SelectedOptimizer
from areal.engine.lora.checkpoint import AdapterCheckpointer
from areal.engine.lora.weights import AdaptedWeights, ModelWeights
from areal.utils.distributed import ControlPlane


class Engine(RunInfo, Protocol):
    """What is asked of an engine."""

    config: TrainEngineConfig
    control: ControlPlane


def with_adapters(
    parts: EngineComponents, weights: ModelWeights, adapters: AdapterSet, engine: Engine
) -> EngineComponents:
    """The same parts with optimizers, checkpoints and weights that are those of adapters.

    Args:
        parts: of a model that is not trained. weights: of that model.
    """
    config, adapted = engine.config, AdaptedWeights(weights, adapters)
    trained = config.optimizer is not None
    return replace(
        parts,
        optimizer=SelectedOptimizer(adapters) if trained else None,
        checkpointer=AdapterCheckpointer(adapters, adapted, engine, engine.control, config.path, trained),
        weights=adapted,
        zero_grad=adapters.zero_grad,
        before_backward=lambda: adapters.current.before_backward(),
        adapters=adapters,
    )
