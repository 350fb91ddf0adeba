"""Floating point operations and bytes of torch operations, from the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

_UNREAD = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Operations that allocate memory without writing it."""


def operation_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the floating point operations of a matrix product or of attention, and 0 for other operations.

    Attention counts the keys that a causal mask leaves: half of the longest segment's, or a window's.
    """
    name = func._schema.name
    if name in ("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"):
        backward = name.endswith("backward")
        query = args[1] if backward else args[0]
        options = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        # Two products forward, five backward with the recomputed logits (Dao, 2023).
        keys = options["max_k"] / 2
        window = options.get("window_size")
        if window is not None and window[0] >= 0:
            keys = min(keys, window[0] + 1)
        return 2 * (5 if backward else 2) * query.numel() * keys
    if name == "aten::_grouped_mm":
        return 2 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(func.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


def operation_bytes(func: Any, args: Any, kwargs: Any, out: Sequence[Tensor]) -> float:
    """Return the bytes that an operation reads and writes."""
    name = func._schema.name.split("::")[1]
    if name in _UNREAD:
        return 0.0
    read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    written = sum(x.nbytes for x in out)
    # A lookup reads the rows that it returns, not the whole table.
    if func.overloadpacket in (torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.index):
        return 2.0 * written
    return float(sum(x.nbytes for x in read) + written)
