"""Products of torchao's recipes: values and gradients by numpy, and which of them depend on other tokens."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

if find_spec("torchao") is None:
    pytest.skip("torchao is not installed: make test-torchao", allow_module_level=True)

from areal.api import Float8Config
from areal.api.sections.float8 import Float8Recipe
from areal.engine.torch.float8.layers import convert_layers
from areal.engine.torch.float8.products import Products, float8_products
from areal.tests.harness.references.float8_reference import Float8Product, experts_forward

RECIPES = get_args(Float8Recipe)
CPU = torch.device("cpu")


def products(recipe: Any, dtype: torch.dtype = torch.float32, experts: bool = False) -> Products:
    return float8_products(Float8Config(recipe=recipe, emulate=True, experts=experts), dtype, CPU)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers whose rows have very different sizes, so that a scale of the wrong axis shows."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.randn(shape[:-1], generator=generator).exp()[..., None]).to(
        dtype
    )


def computed(product: Any, x: Tensor, weight: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the product, and the gradients of both operands."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = product(x, weight)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), cotangent))


def distance(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [64, 45])
def test_values_and_gradients_are_those_of_numpy(recipe: str, tokens: int) -> None:
    x, weight, cotangent = drawn(tokens, 64, seed=0), drawn(96, 64, seed=1), drawn(tokens, 96, seed=2)
    actual = computed(products(recipe).linear, x, weight, cotangent)
    expected = computed(lambda x, weight: Float8Product.apply(x, weight, recipe), x, weight, cotangent)
    exact = computed(nn.functional.linear, x.double(), weight.double(), cotangent.double())
    for found, wanted, plain in zip(actual, expected, exact, strict=True):
        assert distance(found, wanted) < 1e-6
        assert distance(found, plain) < 0.1
    assert distance(actual[0], exact[0]) > 1e-2
    in_dtype = recipe.endswith("_with_gw_hp")
    assert (distance(actual[2], exact[2]) < 1e-6) == in_dtype


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_parts_sum_to_that_of_the_batch_with_gw_hp_alone(recipe: str) -> None:
    product, cuts = products(recipe).linear, [7, 30, 33]
    # The exponent of a float8 number makes the scale of a row matter only for numbers far below the largest one.
    sizes = torch.exp2(-torch.arange(70) / 4)[:, None]
    x, weight, cotangent = drawn(70, 64, seed=3) * sizes, drawn(96, 64, seed=4), drawn(70, 96, seed=5)
    out, grad_x, grad_weight = computed(product, x, weight, cotangent)
    parts = [computed(product, a, weight, b) for a, b in zip(x.split(cuts), cotangent.split(cuts), strict=True)]
    whole = (
        distance(torch.cat([part[0] for part in parts]), out),
        distance(torch.cat([part[1] for part in parts]), grad_x),
    )
    of_weight = distance(torch.stack([part[2] for part in parts]).sum(0), grad_weight)
    assert (max(*whole, of_weight) < 1e-6) == recipe.endswith("_with_gw_hp")
    # Rows and blocks of tokens do not see other tokens; a scale for the whole tensor does.
    assert (max(whole) < 1e-6) == (recipe != "tensorwise")


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_with_gw_hp"])
def test_experts_of_any_number_of_tokens(recipe: str) -> None:
    ours = products(recipe, torch.bfloat16, experts=True)
    assert ours.grouped is not None
    sizes = [7, 0, 33, 10]
    x, cotangent = drawn(50, 64, seed=6, dtype=torch.bfloat16), drawn(50, 96, seed=7, dtype=torch.bfloat16)
    weights = drawn(4, 96, 64, seed=8, dtype=torch.bfloat16)
    ends = torch.tensor(sizes).cumsum(0).int()
    out, grad_x, grad_weights = computed(lambda x, w: ours.grouped(x, w.transpose(-2, -1), ends), x, weights, cotangent)
    for expert, (part, grad, mine, back) in enumerate(
        zip(*(each.split(sizes) for each in (x, cotangent, out, grad_x)), strict=True)
    ):
        if not len(part):
            assert not grad_weights[expert].any()
            continue
        reference = lambda x, weight: Float8Product.apply(x, weight, recipe)  # noqa: E731
        expected = computed(reference, part.float(), weights[expert].float(), grad.float())
        for found, wanted in zip((mine, back, grad_weights[expert]), expected, strict=True):
            assert distance(found, wanted) < 5e-3


def test_experts_without_tokens_have_zero_gradients() -> None:
    grouped = products("mxfp8", torch.bfloat16, experts=True).grouped
    assert grouped is not None
    x, weights = torch.empty(0, 64, dtype=torch.bfloat16), drawn(4, 96, 64, seed=9, dtype=torch.bfloat16)
    ends = torch.zeros(4, dtype=torch.int32)
    out, grad_x, grad_weights = computed(
        lambda x, w: grouped(x, w.transpose(-2, -1), ends), x, weights, torch.empty(0, 96).bfloat16()
    )
    assert (out.shape, grad_x.shape) == ((0, 96), (0, 64))
    assert grad_weights.shape == weights.shape
    assert not grad_weights.any()


def test_experts_of_transformers_multiply_float8_numbers() -> None:
    """Errors of bfloat16 are far below those of float8."""
    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    layer, recipe = nn.Module(), "mxfp8_with_gw_hp"
    layer.experts = module = Qwen3MoeExperts(config).bfloat16()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = drawn(*parameter.shape, seed=seed, dtype=torch.bfloat16) / 8
    x, scores = drawn(21, 64, seed=2, dtype=torch.bfloat16), torch.rand(21, 2)
    chosen = torch.rand(21, 4).topk(2).indices
    plain = module(x, chosen, scores.bfloat16())
    wide = copy.deepcopy(module).float()
    wanted = experts_forward(wide, x.float(), chosen, scores.bfloat16().float(), recipe)
    options = Float8Config(recipe=recipe, emulate=True, experts=True)
    assert convert_layers([layer], options, products(recipe, torch.bfloat16, experts=True)) == ["experts"]
    actual = module(x, chosen, scores.bfloat16())
    assert distance(actual, wanted) < 1e-2
    assert distance(plain, wanted) > 2e-2
    grads = [
        torch.autograd.grad(out.square().sum(), list(each.parameters()))
        for out, each in ((actual, module), (wanted, wide))
    ]
    assert all(distance(found, want) < 3e-2 for found, want in zip(*grads, strict=True))
