"""What an engine holds beside the training step: weights, gradients and optimizer state, and where they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from areal.api.checkpoint import SaveLoadMeta
from areal.api.engine import TrainEngine
from areal.api.weights import NamedTensor
from areal.engine.components import EngineComponents
from areal.engine.lora.adapter_set import AdapterSet
from areal.utils.distributed import ControlPlane
from areal.utils.profiling.phase_timer import PhaseTimer
from areal.utils.profiling.profiler import profiled


class EngineState(TrainEngine):
    """Streams, saves, loads and moves what the parts hold; what is away in host memory is brought back first."""

    control: ControlPlane
    timer: PhaseTimer

    @abstractmethod
    def _require_components(self) -> EngineComponents:
        """The parts, or a ``RuntimeError`` where there are none."""

    @abstractmethod
    def _require_gradients(self) -> EngineComponents:
        """The parts, with gradients that are complete."""

    def named_tensors(self) -> Iterator[NamedTensor]:
        parts = self._require_components()
        parts.memory.onload(params=True, grads=False, optimizer=False)
        return parts.weights.named_tensors()

    def named_gradients(self) -> Iterator[NamedTensor]:
        parts = self._require_gradients()
        parts.memory.onload(params=True, grads=True, optimizer=False)
        return parts.weights.named_gradients()

    def save(self, meta: SaveLoadMeta) -> None:
        parts = self._require_components()
        parts.memory.onload(params=True, grads=False, optimizer=meta.with_optim)
        parts.checkpointer.save(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        parts = self._require_components()
        parts.memory.onload(params=True, grads=False, optimizer=meta.with_optim)
        self.zero_grad()
        parts.checkpointer.load(meta)

    def wait_for_checkpoint(self) -> None:
        self._require_components().checkpointer.wait()

    def offload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        self._require_components().memory.offload(params=params, grads=grads, optimizer=optimizer)

    def onload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        self._require_components().memory.onload(params=params, grads=grads, optimizer=optimizer)

    @property
    def adapters(self) -> AdapterSet:
        adapters = self._require_components().adapters
        if adapters is None:
            raise RuntimeError("the engine has no adapters: set TrainEngineConfig.lora=LoRAConfig(...) to train some")
        return adapters

    def reference(self) -> AbstractContextManager[None]:
        if self._require_components().adapters is None:
            raise RuntimeError(
                "the engine trains the model itself, and has no other: make a second engine without an optimizer, or set lora=LoRAConfig(...)"
            )
        return self.adapters.off()

    def profile(self, folder: str | Path, *, memory: bool = True, stacks: bool = False) -> AbstractContextManager[None]:
        self._require_components()
        return profiled(self.timer, self.device, self.control.rank, folder, memory=memory, stacks=stacks)
