"""The components of an engine that trains adapters instead of the model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Protocol

import torch

from areal.api.config import TrainEngineConfig
from areal.api.memory import EngineMemory
from areal.engine.checkpoint.checkpointer import RunInfo
from areal.engine.components import EngineComponents, Memory
from areal.engine.lora.adapter import Adapter
from areal.engine.lora.adapter_set import AdapterSet, SelectedOptimizer
from areal.engine.lora.checkpoint import AdapterCheckpointer
from areal.engine.lora.weights import AdaptedWeights, ModelWeights
from areal.engine.optimizer import GradientState
from areal.utils.distributed import ControlPlane
from areal.utils.offload import HostMemory, expected_state_bytes, optimizer_tensors


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


class AdaptedMemory:
    """The tensors of a model and of its adapters. Implements :class:`areal.engine.components.Memory`.

    Adapters are small: they stay on the device.

    Args:
        model: tensors of the model.
        adapters: adapters, of which all are counted.
    """

    def __init__(self, model: Memory, adapters: AdapterSet) -> None:
        self._model, self._adapters = model, adapters

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        return self._model.offload(params=params, grads=grads, optimizer=optimizer)

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        return self._model.onload(params=params, grads=grads, optimizer=optimizer)

    def report(self, device: torch.device) -> EngineMemory:
        total = self._model.report(device)
        for name in self._adapters.names:
            total = total + _adapter_memory(self._adapters[name], device)
        return total


def _adapter_memory(adapter: Adapter, device: torch.device) -> EngineMemory:
    """Return the bytes of one adapter, which stay on the device."""
    inner = None if adapter.optimizer is None else adapter.optimizer.inner
    own = HostMemory(
        {
            "params": lambda: adapter.parameters,
            "grads": lambda: [x.grad for x in adapter.parameters if x.grad is not None],
            "optimizer": lambda: [] if inner is None else optimizer_tensors(inner),
        },
        expected={
            "grads": lambda: 0 if inner is None else sum(x.nbytes for x in adapter.parameters),
            "optimizer": lambda: 0 if inner is None else expected_state_bytes(inner),
        },
    ).report(device)
    kinds = {kind.name: getattr(own, kind.name) for kind in fields(own)}
    return EngineMemory(**{name: replace(kind, fixed=kind.on_device + kind.missing) for name, kind in kinds.items()})


def with_adapters(
    components: EngineComponents, weights: ModelWeights, adapters: AdapterSet, engine: Engine
) -> EngineComponents:
    """Replace the optimizer, the checkpointer, the weights, the gradients and the memory report by those of adapters.

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
        memory=AdaptedMemory(components.memory, adapters),
        gradients=SelectedGradients(adapters),
        adapters=adapters,
    )
