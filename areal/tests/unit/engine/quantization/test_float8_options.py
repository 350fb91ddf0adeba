"""Options of float8 products: layers that are converted, and what is refused, without torchao."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from areal.api import Float8Config, FSDPConfig, QuantizationConfig, TrainEngineConfig
from areal.engine.fsdp import layers
from areal.engine.torch.float8.layers import convert_layers
from areal.engine.torch.float8.products import Products, float8_products
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import global_batch, loss, started

CPU = torch.device("cpu")


def half(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight) / 2


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, weights, offs=ends) / 2


HALF = Products(half, grouped, 16)


class Layer(nn.Module):
    def __init__(self, inputs: int = 32) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(inputs, 64), nn.Linear(inputs, 4)


def test_routers_and_excluded_layers_are_left_alone() -> None:
    layer, config = Layer(), Float8Config(emulate=True)
    assert convert_layers([layer], config, HALF) == ["up"]
    x = torch.randn(2, 3, 32)
    assert torch.equal(layer.gate(x), nn.functional.linear(x, layer.gate.weight, layer.gate.bias))
    assert torch.equal(layer.up(x), half(x, layer.up.weight) + layer.up.bias)
    everything = Float8Config(exclude=("up", "gate"))
    with pytest.raises(ValueError, match=r"float8.exclude = .*no layer is left"):
        convert_layers([Layer()], everything, HALF)


@pytest.mark.world(1)
@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "mxfp8"])
def test_engine_multiplies_by_the_products_of_a_recipe(recipe: Any) -> None:
    config, batch = Float8Config(recipe=recipe, emulate=True), global_batch(0)
    with started("fsdp:d1", path=model_dir("qwen3")) as engine:
        plain = engine.eval_batch(batch, loss).loss
    with (
        mock.patch.object(layers, "float8_products", return_value=Products(half, None, 8)) as made,
        started("fsdp:d1", path=model_dir("qwen3"), fsdp={"float8": config}) as engine,
    ):
        assert engine.eval_batch(batch, loss).loss != pytest.approx(plain, rel=1e-3)
    assert made.call_args.args == (config, torch.float32, CPU)


def test_a_module_without_grouped_products_is_named() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(2, 64, 32)), nn.Parameter(torch.ones(2, 32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.down_proj[0]

    layer = nn.Module()
    layer.experts = Experts()
    config = Float8Config(recipe="mxfp8", experts=True, emulate=True)
    assert convert_layers([layer], config, HALF) == ["experts"]
    with pytest.raises(ValueError, match=r"float8.experts = True: Experts multiplies by no grouped product of torch"):
        layer.experts(torch.ones(1, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fsdp:t2"}, r"fsdp.float8 with backend = 'fsdp:t2'"),
        ({"dtype": "float64", "master_dtype": "float64", "grad_reduce_dtype": "float64"}, r"fsdp.float8 with dtype = 'float64'"),
        ({"fsdp": {"quantization": QuantizationConfig()}}, r"fsdp.float8 with fsdp.quantization"),
        ({"fsdp": {"batch_invariant": True}}, r"fsdp.batch_invariant = True with fsdp.float8"),
        ({"dtype": "float32", "fsdp": {"float8": Float8Config(recipe="mxfp8", experts=True)}}, r"float8.experts = True and dtype = 'float32'"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    fsdp = {"float8": Float8Config(), **options.pop("fsdp", {})}
    with pytest.raises(ValueError, match=message):
        TrainEngineConfig(path="x", fsdp=FSDPConfig(**fsdp), **options)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_recipes_without_products_of_experts_are_refused(recipe: Any) -> None:
    with pytest.raises(ValueError, match=rf"float8.experts = True with recipe = '{recipe}'"):
        Float8Config(recipe=recipe, experts=True)
    with pytest.raises(ValueError, match=r"torchao emulates products of experts for 'mxfp8' alone"):
        Float8Config(recipe="rowwise", experts=True, emulate=True)


def test_hardware_sizes_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"fsdp.float8.recipe = 'mxfp8' on device 'cpu': .*set float8.emulate = True"):
        float8_products(Float8Config(recipe="mxfp8"), torch.bfloat16, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    with pytest.raises(ValueError, match=r"'mxfp8' on H100: .*needs? compute capability 10.0, and this GPU has 9.0"):
        float8_products(Float8Config(recipe="mxfp8"), torch.bfloat16, torch.device("cuda"))
    with pytest.raises(
        ValueError, match=r"'rowwise_with_gw_hp': up has 40 inputs and 64 outputs, .*multiples of 16; add 'up'"
    ):
        convert_layers([Layer(40)], Float8Config(), HALF)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match=r"needs torchao 0.18 or newer .*pip install 'areal\[float8\]'"):
        float8_products(Float8Config(emulate=True), torch.float32, CPU)
