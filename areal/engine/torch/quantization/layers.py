"""Linear layers and experts that compute with rounded operands; the backward takes rounding as the identity (straight-through)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from areal.api.sections.quantization import QuantizationConfig
from areal.engine.model.stacked_experts import (
    WEIGHTS,
    check_convertible,
    has_stacked_experts,
    is_grouped_product,
    replaced_weights,
)
from areal.engine.torch.quantization.formats import Format, Rounding, format_of

_PRODUCTS = {F.linear, torch.bmm}
"""Products of experts apart from grouped ones. The first argument is their input."""


def straight_through(x: Tensor, rounding: Rounding) -> Tensor:
    """Return the rounded tensor. Its gradient is that of ``x`` (Bengio et al., 2013)."""
    rounded: Tensor = _StraightThrough.apply(x, rounding)
    return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def round_layers(layers: Sequence[nn.Module], config: QuantizationConfig) -> list[str]:
    """Let the linear layers and experts inside of decoder layers compute with rounded operands, in place.

    Args:
        layers: decoder layers. They may be on the meta device.
        config: the format, and the layers that are left out.

    Returns:
        Names of the layers that round, relative to their decoder layer, each once.

    Raises:
        ValueError: the inputs of a layer do not divide into groups, or no layer is left.
    """
    form = format_of(config)
    found: dict[str, None] = {}
    for layer in layers:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] in config.exclude:
                continue
            check_convertible(name, module, "quantization.exclude")
            weights = _weights_of(module)
            if not weights:
                continue
            for weight in weights:
                _check(f"{name}.{weight}", module._parameters[weight], form, config)
            module.forward = _RoundedForward(module, weights, form)
            found[name] = None
    if not found:
        raise ValueError(f"quantization.exclude = {config.exclude}: no layer is left to round; leave names out of it")
    return list(found)


def _weights_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that are multiplied with inputs; none for other modules."""
    if isinstance(module, nn.Linear):
        return ("weight",)
    return WEIGHTS if has_stacked_experts(module) else ()


def _check(name: str, weight: Tensor | None, form: Format, config: QuantizationConfig) -> None:
    if weight is not None and weight.shape[-1] % form.group:
        raise ValueError(
            f"quantization.format = {config.format!r}: {name} has {weight.shape[-1]} inputs, which groups of {form.group} do not divide; "
            f"add {name.split('.')[-2]!r} to quantization.exclude, or choose another format or group_size"
        )


class _RoundedForward:
    """Forward of a module with rounded weights and inputs of its products.

    Args:
        module: a linear layer, or experts. Its forward up to now is called with the rounded weights in place of its own.
        weights: names of the weights.
        form: the format.
    """

    def __init__(self, module: nn.Module, weights: Sequence[str], form: Format) -> None:
        self._module, self._weights, self._form = module, weights, form
        self._inner = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rounded = {name: straight_through(getattr(self._module, name), self._form.weight) for name in self._weights}
        inputs = self._form.inputs
        watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if inputs is not None and isinstance(self._module, nn.Linear):
            args = (straight_through(args[0], inputs),)
        elif inputs is not None:
            watch = _RoundedInputs(inputs)
        with replaced_weights(self._module, rounded), watch:
            return self._inner(*args, **kwargs)


class _RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of all products inside: the second product of experts has one that no caller sees."""

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS or is_grouped_product(func):
            args = (straight_through(args[0], self._rounding), *args[1:])
        return func(*args, **(kwargs or {}))
