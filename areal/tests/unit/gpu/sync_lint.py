"""Finds operations that would make the host wait for a GPU, on a machine without one: the meta device takes its place."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_READS = (
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
)
"""Operations whose result, or its shape, depends on values: the host waits for them."""


class SyncLint(TorchDispatchMode):
    """Records copies from the host to the device, and operations for which the host would wait.

    Attributes:
        copies: asynchronous copies from the host.
        waits: copies that block, operations that read values, and operations on tensors of both devices.
        value: what a tensor of the device reads as, since it has no values: ones if ``None``.
    """

    value: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []
        self.waits: list[str] = []
        self._patches = ExitStack()

    def __enter__(self) -> SyncLint:
        # torch.tensor(data, device=...) copies, which a dispatch mode does not see.
        for name in ("tensor", "as_tensor"):
            self._patches.enter_context(mock.patch.object(torch, name, self._watched(name, getattr(torch, name))))
        self._patches.enter_context(mock.patch.object(Tensor, "tolist", self._read(Tensor.tolist)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _watched(self, name: str, right: Any) -> Any:
        def call(data: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.device(kwargs.get("device") or "cpu") == DEVICE:
                self.waits.append(f"torch.{name} on the device")
            return right(data, *args, **kwargs)

        return call

    def _read(self, right: Any) -> Any:
        """Return a stand-in of ``tolist``: on the device it reads :attr:`value`."""

        def tolist(x: Tensor) -> Any:
            if x.device != DEVICE:
                return right(x)
            self.waits.append(f"tolist {list(x.shape)}")
            return torch.ones(x.shape).tolist() if self.value is None else self.value

        return tolist

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in tensors if x.device == DEVICE]
        # A scalar of the host is passed by value.
        on_host = [x for x in tensors if x.device.type == "cpu" and x.dim() and x.numel()]
        shapes = [list(x.shape) for x in tensors]
        if func in _COPIES:
            # copy_(target, source, non_blocking) or _to_copy(source, *, device, non_blocking)
            in_place = func is _COPIES[1]
            source, target = (
                args[in_place].device,
                args[0].device if in_place else torch.device(kwargs.get("device") or args[0].device),
            )
            asynchronous = kwargs.get("non_blocking", in_place and args[2:3] == (True,))
            if (source == DEVICE) != (target == DEVICE):
                (self.copies if asynchronous else self.waits).append(f"{func} {shapes}")
        elif on_device and func.overloadpacket.__name__ in _READS:
            self.waits.append(f"{func} {shapes}")
        elif on_device and on_host:
            self.waits.append(f"{func} on tensors of both devices {shapes}")
        return func(*args, **kwargs)
