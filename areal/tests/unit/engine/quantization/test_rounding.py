"""Formats of servers: values by numpy and ml_dtypes, gradients straight through, and the layers that round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from areal.api import FSDPConfig, QuantizationConfig, TrainEngineConfig
from areal.engine.torch.quantization.formats import format_of
from areal.engine.torch.quantization.layers import round_layers, straight_through
from areal.tests.harness.references.rounded_reference import rounding_of

FORMATS = ["fp8", "fp8_blocks", "int4", "nvfp4"]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, with a row and a group of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[:-1], generator=generator).exp()[..., None]
    x[..., -1, :] = 0
    x[..., 0, :16] = 0
    return x.to(dtype)


def config(form: str) -> QuantizationConfig:
    return QuantizationConfig(format=form, group_size=64) if form == "int4" else QuantizationConfig(format=form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(130, 320), (3, 40, 128)])
def test_values_are_those_of_ml_dtypes(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = drawn(*shape, dtype=dtype)
    wide = x.double().numpy() if dtype == torch.float64 else x.float().numpy()
    ours = format_of(config(form))
    weights, inputs = rounding_of(form, 64)
    if form == "int4" and dtype == torch.bfloat16:
        weights = rounded_scales(64)
    assert torch.equal(ours.weight(x), torch.from_numpy(weights(wide)).to(dtype))
    assert (ours.inputs is None) == (inputs is None)
    if ours.inputs is not None and inputs is not None:
        assert torch.equal(ours.inputs(x), torch.from_numpy(inputs(wide)).to(dtype))
    assert not torch.equal(ours.weight(x), x)


def rounded_scales(size: int) -> object:
    """Integers whose scales are bfloat16, as those of files with bfloat16 weights."""

    def weights(x: np.ndarray) -> np.ndarray:
        grouped = torch.from_numpy(x).unflatten(-1, (-1, size))
        scale = (grouped.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
        return ((grouped / scale).nan_to_num(0).round().clamp(-8, 7) * scale).flatten(-2).numpy()

    return weights


@pytest.mark.parametrize("form", FORMATS)
def test_rounding_again_changes_little(form: str) -> None:
    """A server that rounds weights that are rounded already gets nearly the same; float8 with a scale of each row the same."""
    form_of = format_of(config(form))
    once = form_of.weight(drawn(64, 128))
    again = form_of.weight(once)
    tolerance = {"fp8": 0.0, "fp8_blocks": 0.0, "int4": 0.08, "nvfp4": 0.0}[form]
    assert (again - once).abs().max() <= tolerance * once.abs().max()


@pytest.mark.parametrize("form", FORMATS)
def test_gradients_pass_straight_through(form: str) -> None:
    x = drawn(4, 128).requires_grad_()
    cotangent = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    (straight_through(x, format_of(config(form)).weight) * cotangent).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, cotangent)


class Layer(nn.Module):
    def __init__(self, inputs: int = 32) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(inputs, 64), nn.Linear(inputs, 4)
        self.norm = nn.LayerNorm(inputs)


def test_routers_and_excluded_layers_do_not_round() -> None:
    layer = Layer()
    assert round_layers([layer], QuantizationConfig()) == ["up"]
    x = torch.randn(3, 32)
    assert torch.equal(layer.gate(x), nn.functional.linear(x, layer.gate.weight, layer.gate.bias))
    assert not torch.equal(layer.up(x), nn.functional.linear(x, layer.up.weight, layer.up.bias))
    with pytest.raises(ValueError, match=r"quantization.exclude = .*no layer is left"):
        round_layers([Layer()], QuantizationConfig(exclude=("up", "gate")))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"up.weight has 40 inputs, which groups of 16 do not divide; add 'up' to"):
        round_layers([Layer(40)], QuantizationConfig(format="nvfp4"))
    with pytest.raises(ValueError, match=r"quantization.group_size = 32 with format = 'fp8'"):
        QuantizationConfig(group_size=32)
    quantization = QuantizationConfig()
    with pytest.raises(ValueError, match=r"fsdp.quantization with backend = 'fsdp:t2'"):
        TrainEngineConfig(path="x", backend="fsdp:t2", fsdp=FSDPConfig(quantization=quantization))
    with pytest.raises(ValueError, match=r"fsdp.quantization with fsdp.compile = True"):
        TrainEngineConfig(path="x", fsdp=FSDPConfig(quantization=quantization, compile=True))
