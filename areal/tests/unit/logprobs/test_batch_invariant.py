"""Products and functions whose bits do not depend on the number of rows, and on where a row is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.utils.functional.batch_invariant import TILE, batch_invariant

ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHAPES = ((48, 7), (100, 37), (256, 688))
"""Inputs and outputs of a linear layer: also sizes that are no multiple of a vector."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differing(function: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """Return the numbers of rows at the beginning or end of ``x`` whose results differ from those in the whole of ``x``."""
    whole = function(x)
    ends = {n: (x[:n].clone(), x[-n:].clone()) for n in ROWS}
    return [
        n
        for n, (first, last) in ends.items()
        if not (torch.equal(function(first), whole[:n]) and torch.equal(function(last), whole[-n:]))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_products_have_the_same_bits_in_any_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, outputs = shape
    x, weight = numbers(130, inputs, dtype=dtype), numbers(outputs, inputs, dtype=dtype, seed=1)
    bias = numbers(outputs, dtype=dtype, seed=2)
    with batch_invariant():
        assert differing(lambda rows: F.linear(rows, weight), x) == []
        assert differing(lambda rows: F.linear(rows, weight, bias), x) == []
        assert differing(lambda rows: (rows.view(1, *rows.shape) @ weight.t())[0], x) == []
        assert differing(lambda rows: torch.bmm(rows.expand(2, -1, -1), weight.t().expand(2, -1, -1))[1], x) == []
        assert (
            differing(lambda rows: torch.addmm(rows[:, :1].expand(-1, outputs), rows, weight.t(), alpha=0.3), x) == []
        )
        result, exact = F.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(result.double(), exact, rtol=1e-2, atol=1e-3)


def test_without_the_context_rows_of_products_differ() -> None:
    x, weight = numbers(130, 256), numbers(688, 256, seed=1)
    assert differing(lambda rows: F.linear(rows, weight), x)


def test_weights_at_any_address_give_the_same_bits() -> None:
    x, memory = numbers(TILE, 48), torch.empty(7 * 48 + 8)
    results = []
    with batch_invariant():
        for offset in range(8):
            weight = memory[offset : offset + 7 * 48].view(7, 48).copy_(numbers(7, 48, seed=1))
            results.append(x @ weight.t())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid", "softplus", "exp", "tanh", "cos"])
def test_functions_have_the_same_bits_at_any_place(name: str, dtype: torch.dtype) -> None:
    function = getattr(F, name, None) or getattr(torch, name)
    x = numbers(130, 77, dtype=dtype)
    with batch_invariant():
        assert differing(function, x) == []
        torch.testing.assert_close(function(x), function(x.double()).to(dtype))


def test_without_the_context_functions_differ() -> None:
    x = numbers(130, 77)
    assert differing(F.silu, x) or differing(lambda rows: F.gelu(rows, approximate="tanh"), x)


def test_gradients_are_those_of_plain_products() -> None:
    gradients = []
    for inside in (True, False):
        x, weight = numbers(45, 20).double().requires_grad_(), numbers(9, 20, seed=1).double().requires_grad_()
        if inside:
            with batch_invariant():
                out = F.silu(F.linear(x, weight))
        else:
            out = F.silu(F.linear(x, weight))
        gradients.append(torch.autograd.grad(out.square().sum(), [x, weight]))
    for mine, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)


def test_products_without_a_rule_are_refused() -> None:
    x = numbers(4, 4)
    with batch_invariant(), pytest.raises(RuntimeError, match="has no rule"):
        torch.mv(x, x[0])
    torch.mv(x, x[0])


def test_the_context_ends_after_an_error_and_nests() -> None:
    x, weight = numbers(130, 256), numbers(688, 256, seed=1)
    with batch_invariant():
        with batch_invariant():
            inner = F.linear(x[:1], weight)
        assert torch.equal(F.linear(x[:1], weight), inner)
    with pytest.raises(KeyError), batch_invariant():
        raise KeyError
    assert torch.equal(F.linear(x[:1], weight), x[:1] @ weight.t())
