"""Bugs of float32 products by oneDNN."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

_PRODUCT = "areal.utils.functional.product"
_TESTS = "unit/engine/layers/test_onednn_products.py::"


@mutant(f"{_PRODUCT}:_onednn_product", f"{_TESTS}test_operands_in_any_layout")
def products_without_bias(right: Function) -> Function:
    """The bias of a product is left out."""
    return lambda a, b, bias: right(a, b, None)


@mutant(f"{_PRODUCT}:_OneDNNLinear.forward", f"{_TESTS}test_what_is_kept[x]")
def input_of_a_frozen_weight_is_kept(right: Function) -> Function:
    """A frozen weight keeps its input for the backward, which does not need it."""

    def wrong(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        out = right(ctx, x, weight, bias)
        ctx.save_for_backward(x, weight)
        return out

    return wrong


@mutant(f"{_PRODUCT}:onednn_computes", f"{_TESTS}test_not_where_torch_is_as_fast_or_another_is_asked_for")
def float32_under_autocast(right: Function) -> Function:
    """Products stay in float32 where autocast asks for bfloat16."""

    def wrong(dtype: torch.dtype, device: torch.device) -> bool:
        with torch.autocast("cpu", enabled=False):
            return bool(right(dtype, device))

    return wrong


@mutant(f"{_PRODUCT}:linear_product", f"{_TESTS}test_not_where_torch_is_as_fast_or_another_is_asked_for")
def products_of_torch_everywhere(right: Function) -> Function:
    """Linear layers do not use the faster products."""
    return F.linear
