"""Tensors between the device and host memory, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Away = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]


class HostMemory:
    """Copies storages to host memory and frees them in place, so that every view of them stays valid once they are back.

    Args:
        tensors: what there is to move, under ``"params"``, ``"grads"`` and ``"optimizer"``.
    """

    def __init__(self, tensors: Mapping[str, Callable[[], Iterable[Tensor]]]) -> None:
        self._tensors = tensors
        self._away: dict[str, Away] = {}

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Move what is named; what is away already stays there."""
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted and kind not in self._away:
                self._away[kind] = [_send_away(storage) for storage in _storages(self._tensors[kind]())]

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Bring back what is named; what is here already stays."""
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted:
                for storage, copy in self._away.pop(kind, []):
                    storage.resize_(copy.nbytes())
                    storage.copy_(copy)

    def forget(self, kind: str) -> None:
        """Leave what is away where it is: nobody will want it back."""
        self._away.pop(kind, None)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The state of a torch optimizer, but for scalars."""
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    local = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    unique = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in local if x.untyped_storage().nbytes()}
    return list(unique.values())


def _send_away(storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, torch.UntypedStorage]:
    copy = storage.cpu() if storage.device.type != "cpu" else storage.clone()
    storage.resize_(0)
    return storage, copy
