"""Memory of an engine: what it can move to the host, and its report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KindMemory:
    """Bytes of one kind of tensors on one rank: parameters, gradients or optimizer state.

    Bytes are those of the allocations of this rank's shards, with the padding of uneven shards. Scalars of the optimizer, such as the number
    of the step, are not counted.

    Attributes:
        on_device: on the engine's device.
        offloaded: in host memory or in files.
        missing: of tensors that do not exist yet, such as AdamW's state before the first step; at most.
        fixed: those of ``on_device`` and ``missing`` that ``offload`` leaves on the device: tensors of adapters.
    """

    on_device: int = 0
    offloaded: int = 0
    missing: int = 0
    fixed: int = 0

    def __add__(self, other: KindMemory) -> KindMemory:
        return KindMemory(
            self.on_device + other.on_device,
            self.offloaded + other.offloaded,
            self.missing + other.missing,
            self.fixed + other.fixed,
        )

    @property
    def total(self) -> int:
        """Bytes of all tensors, anywhere, also of those that do not exist yet."""
        return self.on_device + self.offloaded + self.missing


@dataclass(frozen=True)
class EngineMemory:
    """Memory that an engine holds on one rank between calls. Activations and gathered weights are not included.

    Attributes:
        params: parameters, including adapters.
        grads: pending gradients. Megatron's gradient buffers always exist.
        optimizer: state of the optimizer, including float32 main parameters.
    """

    params: KindMemory = field(default_factory=KindMemory)
    grads: KindMemory = field(default_factory=KindMemory)
    optimizer: KindMemory = field(default_factory=KindMemory)

    def __add__(self, other: EngineMemory) -> EngineMemory:
        return EngineMemory(self.params + other.params, self.grads + other.grads, self.optimizer + other.optimizer)

    @property
    def on_device(self) -> int:
        """Bytes of all kinds on the device."""
        return self.params.on_device + self.grads.on_device + self.optimizer.on_device

    @property
    def offloaded(self) -> int:
        """Bytes of all kinds in host memory or in files."""
        return self.params.offloaded + self.grads.offloaded + self.optimizer.offloaded


class Offloadable(ABC):
    """State that can be moved to host memory and back."""

    @abstractmethod
    def offload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        """Move parameters, pending gradients and optimizer state, as selected, to host memory, and return unused device memory.

        A verb that needs them calls :meth:`onload` first.
        """

    @abstractmethod
    def onload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        """Move the selected tensors back to the device, bitwise equal. Arguments as for :meth:`offload`."""

    @abstractmethod
    def memory(self) -> list[EngineMemory]:
        """Return the bytes that the engine holds on this rank, by kind, on the device and offloaded. Not collective.

        A group returns one entry for each of its ranks.
        """
