"""Matrix products of float8 numbers by torchao, the extra ``float8``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.sections.float8 import Float8Config

_ROWS = 32
"""Rows are filled up to a multiple: the products of gradients of weights have rows inside, in blocks of 32."""
_CAPABILITY = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "rowwise_with_gw_hp": (9, 0),
    "mxfp8": (10, 0),
    "mxfp8_with_gw_hp": (10, 0),
}
"""Compute capability of GPUs that multiply numbers of a recipe."""


@dataclass(frozen=True)
class Products:
    """Differentiable products.

    Attributes:
        linear: takes inputs ``[..., in]`` and a weight ``[out, in]``; returns ``[..., out]``.
        grouped: takes inputs ``[rows, in]`` sorted by group, weights ``[groups, in, out]`` and the int32 end of each group's rows; returns
            ``[rows, out]``. ``None`` if experts are not converted.
        multiple: number that must divide ``in`` and ``out``.
    """

    linear: Callable[[Tensor, Tensor], Tensor]
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    multiple: int


def float8_products(config: Float8Config, dtype: torch.dtype, device: torch.device) -> Products:
    """Return the products of a recipe.

    Args:
        config: the recipe.
        dtype: dtype of inputs and weights.
        device: device of inputs and weights.

    Raises:
        ValueError: torchao is not installed, or the device has no such products.
    """
    option = f"fsdp.float8.recipe = {config.recipe!r}"
    mx = config.recipe.startswith("mxfp8")
    if not config.emulate:
        _check_device(option, _CAPABILITY[config.recipe], device)
    try:
        # Imported only if it is used: it logs libraries that it cannot load.
        experts = importlib.import_module("torchao.prototype.moe_training")
        linear = _mx_linear(config) if mx else _float8_linear(config)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{option} needs torchao 0.18 or newer ({error}): pip install 'areal[float8]', or leave fsdp.float8 out"
        ) from error
    return Products(
        _with_filled_rows(linear), _grouped(experts, config, dtype) if config.experts else None, 32 if mx else 16
    )


def _check_device(option: str, needed: tuple[int, int], device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"{option} on device {device.type!r}: its products need CUDA; set float8.emulate = True")
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        raise ValueError(
            f"{option} on {torch.cuda.get_device_name(device)}: its products need compute capability {needed[0]}.{needed[1]}, and this GPU "
            f"has {found[0]}.{found[1]}; choose another recipe, or set float8.emulate = True"
        )


def _with_filled_rows(linear: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Let a product of ``[rows, in]`` take inputs of any shape. Rows of zeros change no scale."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        out = linear(F.pad(rows, (0, 0, 0, -len(rows) % _ROWS)), weight)
        return out[: len(rows)].unflatten(0, x.shape[:-1])

    return product


def _float8_linear(config: Float8Config) -> Callable[[Tensor, Tensor], Tensor]:
    recipes = importlib.import_module("torchao.float8.config")
    options = importlib.import_module("torchao.float8.float8_training_tensor")
    function: Any = importlib.import_module("torchao.float8.float8_linear").matmul_with_hp_or_float8_args
    recipe = dataclasses.replace(recipes.Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate)
    of_recipe = (recipe.gemm_config_output, recipe.gemm_config_grad_input, recipe.gemm_config_grad_weight)
    products = options.LinearMMConfig(
        *(
            options.ScaledMMConfig(config.emulate, each.use_fast_accum, False, recipe.pad_inner_dim)
            for each in of_recipe
        )
    )
    return lambda x, weight: function.apply(x, weight.t(), products, recipe)


def _mx_linear(config: Float8Config) -> Callable[[Tensor, Tensor], Tensor]:
    function: Any = importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")._to_mxfp8_then_scaled_mm
    options = _mx_options(config)
    return lambda x, weight: function(x, weight, **options)


def _mx_options(config: Float8Config) -> dict[str, Any]:
    kernels = importlib.import_module("torchao.quantization.quantize_.common").KernelPreference
    scales = importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
    return {
        "kernel_preference": kernels.EMULATED if config.emulate else kernels.AUTO,
        "scale_calculation_mode": scales.RCEIL,
        "wgrad_with_hp": config.recipe.endswith("_with_gw_hp"),
    }


def _grouped(experts: Any, config: Float8Config, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    # Groups of experts have any number of rows.
    options: dict[str, Any] = {"out_dtype": dtype, "pad_token_groups_for_grouped_mm": True}
    if config.recipe == "rowwise":
        function: Any = experts._to_fp8_rowwise_then_scaled_grouped_mm
    else:
        function, options = experts._to_mxfp8_then_scaled_grouped_mm, options | _mx_options(config)

    def product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        # A rank may get no rows, which have no largest number. Gradients of weights are zeros then.
        return function(x, weights, ends, **options) if len(x) else x @ weights[0]

    return product
