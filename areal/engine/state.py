"""What an engine holds beside the training step: weights, gradients and optimizer state, and where they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from areal.api.checkpoint import SaveLoadMeta
from areal.api.engine import TrainEngine
from areal.api.weights import NamedTensor
from areal.engine.clock import Clock
from areal.engine.lora.adapters import AdapterSet
from areal.engine.parts import EngineParts
from areal.engine.profile import profiled
from areal.utils.distributed import ControlPlane


class EngineState(TrainEngine):
    """Streams, saves, loads and moves what the parts hold; what is away in host memory is brought back first."""

    control: ControlPlane
    clock: Clock

    @abstractmethod
    def _require_parts(self) -> EngineParts:
        """The parts, or a ``RuntimeError`` where there are none."""

    @abstractmethod
    def _require_gradients(self) -> EngineParts:
        """The parts, with gradients that are complete."""

    def named_tensors(self) -> Iterator[NamedTensor]:
        parts = self._require_parts()
        parts.memory.onload(params=True, grads=False, optimizer=False)
        return parts.weights.named_tensors()

    def named_gradients(self) -> Iterator[NamedTensor]:
        parts = self._require_gradients()
        parts.memory.onload(params=True, grads=True, optimizer=False)
        return parts.weights.named_gradients()

    def save(self, meta: SaveLoadMeta) -> None:
        parts = self._require_parts()
        parts.memory.onload(params=True, grads=False, optimizer=meta.with_optim)
        parts.checkpointer.save(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        parts = self._require_parts()
        parts.memory.onload(params=True, grads=False, optimizer=meta.with_optim)
        self.zero_grad()
        parts.checkpointer.load(meta)

    def wait_for_checkpoint(self) -> None:
        self._require_parts().checkpointer.wait()

    def offload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        self._require_parts().memory.offload(params=params, grads=grads, optimizer=optimizer)

    def onload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        self._require_parts().memory.onload(params=params, grads=grads, optimizer=optimizer)

    @property
    def adapters(self) -> AdapterSet:
        adapters = self._require_parts().adapters
        if adapters is None:
            raise RuntimeError("the engine has no adapters: set TrainEngineConfig.lora=LoRAConfig(...) to train some")
        return adapters

    def reference(self) -> AbstractContextManager[None]:
        if self._require_parts().adapters is None:
            raise RuntimeError(
                "the engine trains the model itself, and has no other: make a second engine without an optimizer, or set lora=LoRAConfig(...)"
            )
        return self.adapters.off()

    def profile(self, folder: str | Path, *, memory: bool = True, stacks: bool = False) -> AbstractContextManager[None]:
        self._require_parts()
        return profiled(self.clock, self.device, self.control.rank, folder, memory=memory, stacks=stacks)
