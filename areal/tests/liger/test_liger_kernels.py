"""Liger's kernels agree with transformers' modules in float32, values and gradients, with what surrounds them."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed: make test-liger", allow_module_level=True)
if find_spec("liger_kernel") is None:
    pytest.skip("liger-kernel is not installed: make test-liger", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off: TRITON_INTERPRET=1, or make test-liger", allow_module_level=True)

from liger_kernel import ops

from areal.engine.fsdp.activation_checkpointing import recompute_layers
from areal.engine.model.fused_layers import FUSED, LayerFunctions, fuse_layers
from areal.engine.model.liger import layer_functions
from areal.tests.grid.models import tiny_model
from areal.tests.liger.interpreter import complete_interpreter
from areal.tests.unit.engine.layers.fused_models import CONFIGS, REPLACED, results

BOUND = 1e-5


@pytest.fixture(scope="module")
def functions() -> LayerFunctions:
    complete_interpreter()
    return layer_functions(ops)


def compare(stock: Any, fused: Any, ids: torch.Tensor) -> None:
    expected, actual = results(stock, ids), results(fused, ids)
    assert actual.keys() == expected.keys()
    for name, right in expected.items():
        scale = right.abs().max().clamp_min(1.0)
        assert ((actual[name] - right).abs().max() / scale).item() < BOUND, name


@pytest.mark.parametrize("family", sorted(FUSED))
def test_models_agree_with_transformers(family: str, functions: LayerFunctions) -> None:
    config = CONFIGS[family]()
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    stock = tiny_model(config, seed=0).float()
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    fused = copy.deepcopy(stock)
    assert fuse_layers(fused, config.model_type, functions) == REPLACED[family]
    compare(stock, fused, torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_recomputed_layers_agree(how: Any, family: str, functions: LayerFunctions) -> None:
    config = CONFIGS[family]()
    config._attn_implementation = "eager"
    stock = tiny_model(config, seed=0).float()
    fused = copy.deepcopy(stock)
    fuse_layers(fused, family, functions)
    recompute_layers(list(fused.model.layers), how, 1.0)
    compare(stock, fused, torch.arange(20).view(2, 10))
