"""Bugs of float32 products by oneDNN and OpenBLAS."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

_PRODUCT = "areal.utils.functional.product"
_TESTS = "unit/engine/layers/test_cpu_products.py::"


@mutant(f"{_PRODUCT}:OneDNN.product", f"{_TESTS}test_operands_in_any_layout[oneDNN]")
def products_without_bias(right: Function) -> Function:
    """The bias of a product by oneDNN is left out."""
    return lambda self, a, b, bias=None, into=None: right(self, a, b, None, into)


@mutant(f"{_PRODUCT}:OpenBLAS.product", f"{_TESTS}test_operands_in_any_layout[OpenBLAS]")
def product_beside_its_buffer(right: Function) -> Function:
    """A product by OpenBLAS is in new memory, and the buffer stays as it was."""
    return lambda self, a, b, bias=None, into=None: right(self, a, b, bias, None)


@mutant(f"{_PRODUCT}:faster_library", f"{_TESTS}test_not_where_torch_is_as_fast")
def one_thread_instead_of_several(right: Function) -> Function:
    """OpenBLAS computes with one thread where torch would use several."""

    def wrong(a: Tensor, b: Tensor) -> Any:
        with mock.patch.object(torch, "get_num_threads", return_value=1):
            return right(a, b)

    return wrong


@mutant(f"{_PRODUCT}:_Linear.forward", f"{_TESTS}test_what_is_kept[OpenBLAS-x]")
def input_of_a_frozen_weight_is_kept(right: Function) -> Function:
    """A frozen weight keeps its input for the backward, which does not need it."""

    def wrong(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        out = right(ctx, x, weight, bias)
        ctx.save_for_backward(x, weight)
        return out

    return wrong


@mutant(f"{_PRODUCT}:faster_library", f"{_TESTS}test_not_where_another_is_asked_for[OpenBLAS]")
def float32_under_autocast(right: Function) -> Function:
    """Products stay in float32 where autocast asks for bfloat16."""

    def wrong(a: Tensor, b: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return right(a, b)

    return wrong


@mutant(f"{_PRODUCT}:linear_product", f"{_TESTS}test_not_where_torch_is_as_fast")
def products_of_torch_everywhere(right: Function) -> Function:
    """Linear layers do not use the faster products."""
    return F.linear
