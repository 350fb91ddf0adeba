"""Storages of the tensors that layers save for their backward, on the device or in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from areal.utils.platform import SideCopies
from areal.utils.profiling.moved_bytes import MovedBytes


class ActivationBytes:
    """Bytes of saved storages, on the device and in host memory.

    Args:
        moved: metrics of the next step, which get what is moved and the peaks.

    Attributes:
        on_device, in_host: bytes at present.
    """

    def __init__(self, moved: MovedBytes) -> None:
        self.on_device = self.in_host = 0
        self._moved = moved

    def change_on_device(self, nbytes: int) -> None:
        """Count bytes that were added on the device, or freed if negative."""
        self.on_device += nbytes
        self._moved.reach("activation_device_peak_bytes", self.on_device)

    def change_in_host(self, nbytes: int) -> None:
        """Count bytes that were moved to host memory, or that are not needed there any more if negative."""
        self.in_host += nbytes
        self._moved.reach("activation_host_peak_bytes", self.in_host)
        self._moved.totals["activation_offloaded_bytes"] += max(nbytes, 0)


class SavedStorage:
    """A storage that layers have saved. It exists as long as an autograd graph refers to it.

    Args:
        memory: the storage, on the device.
        device: the device.
        counts: bytes of all storages of an engine.

    Attributes:
        key: address of the storage while it is on the device for the first time.
        nbytes: size.
        memory: the storage on the device; ``None`` while its bytes are in host memory only.
        host: copy in host memory, as uint8 tensors end to end; empty without one.
    """

    def __init__(self, memory: torch.UntypedStorage, device: torch.device, counts: ActivationBytes) -> None:
        self.key, self.nbytes = memory._cdata, memory.nbytes()
        self.memory: torch.UntypedStorage | None = memory
        self.host: Sequence[Tensor] = ()
        self._device, self._counts, self._counted = device, counts, False
        self._arrival: Any = None  # mark of the copy to the device, until it was waited for
        self._arriving = False

    def count(self) -> None:
        """Count the storage as memory of the device, from now on until it is freed."""
        if not self._counted and self.memory is not None:
            self._counted = True
            self._counts.change_on_device(self.nbytes)

    def __del__(self) -> None:
        self.leave()

    def copies_out(self) -> list[tuple[Tensor, Tensor]]:
        """Return the copies to host memory, each as target and source."""
        return list(zip(self.host, self._bytes(), strict=True))

    def leave(self) -> None:
        """Free the memory on the device. The bytes stay in host memory."""
        self.memory = None
        if self._counted:
            self._counted = False
            self._counts.change_on_device(-self.nbytes)

    def copies_back(self) -> list[tuple[Tensor, Tensor]]:
        """Allocate memory on the device, and return the copies from host memory, each as target and source."""
        self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self.count()
        return list(zip(self._bytes(), self.host, strict=True))

    def returns_at(self, mark: Any) -> None:
        """Set the mark behind the copies to the device, which the first reader waits for."""
        self._arrival, self._arriving = mark, True

    def read(self, copies: SideCopies) -> torch.UntypedStorage:
        """Return the storage on the device, for work that the caller enqueues from now on.

        Raises:
            RuntimeError: the call that saved it has ended.
        """
        if self.memory is None:
            raise RuntimeError(
                "the activations of a call that has ended were released: run its backward within the call, or set "
                "fsdp.activation_offload = False"
            )
        if self._arriving:
            copies.wait(self._arrival)
            self._arrival, self._arriving = None, False
        return self.memory

    def _bytes(self) -> Sequence[Tensor]:
        """Return the bytes on the device, cut as the copy in host memory is."""
        values = torch.empty(0, dtype=torch.uint8, device=self._device).set_(self.memory)  # type: ignore[arg-type]
        return values.split([len(piece) for piece in self.host])
