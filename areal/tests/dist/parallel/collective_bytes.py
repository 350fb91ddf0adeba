"""Bytes of the tensors that collectives take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WITH_TENSORS = ("c10d::", "_c10d_functional::")
"""Namespaces of the collectives of tensors."""


class Traffic(TorchDispatchMode):
    """Counts the bytes of the tensors that collectives take."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(WITH_TENSORS) and any(
            kind in func.name() for kind in ("gather", "reduce", "broadcast")
        ):
            # Of c10d's gather the shard is the second argument, and else the tensors are the first.
            tensors = args["allgather" in func.name()]
            tensors = tensors if isinstance(tensors, list) else [tensors]
            # Messages of the control plane are bytes, with their length.
            self.nbytes += sum(x.nbytes for x in tensors if x.dtype is not torch.uint8 and x.numel() > 1)
        return func(*args, **(kwargs or {}))


def streamed(engine: Any, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], int]:
    """Return all weights, and the bytes that collectives took."""
    with Traffic() as traffic:
        return {name: x.clone() for name, x in engine.named_tensors(dtype=dtype)}, traffic.nbytes
