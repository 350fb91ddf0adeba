"""Number formats of inference servers: rounding of weights and of inputs of linear layers, as values of the original dtype.

A format rounds ``x / scale`` to its grid and multiplies by the scale again. Scales are computed in at least float32. They belong to rows,
blocks or groups, so that no result depends on other tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api.sections.quantization import QuantizationConfig

FP8_MAX = 448.0
"""Largest number of float8 e4m3."""
_FP4_MAX = 6.0
"""Largest number of float4 e2m1."""
_BLOCK = 128
"""Rows and columns of a block of a weight with one scale, and inputs of a group with one."""
_NVFP4_GROUP = 16

Rounding = Callable[[Tensor], Tensor]
"""Rounds a tensor, and returns it in its shape and dtype. The last dimension is that of the inputs."""


@dataclass(frozen=True)
class Format:
    """Rounding of the operands of linear layers.

    Attributes:
        weight: rounds weights ``[..., out, in]``.
        inputs: rounds inputs ``[..., in]``; ``None`` leaves them as they are.
        group: number that must divide ``in``.
    """

    weight: Rounding
    inputs: Rounding | None
    group: int = 1


def format_of(config: QuantizationConfig) -> Format:
    """Return the format that a configuration names."""
    if config.format == "fp8":
        return Format(fp8_rows, fp8_rows)
    if config.format == "fp8_blocks":
        return Format(fp8_blocks, fp8_groups)
    if config.format == "int4":
        return Format(lambda weight: int4_groups(weight, config.group_size), None, config.group_size)
    return Format(nvfp4_groups, None, _NVFP4_GROUP)


def fp8_rows(x: Tensor) -> Tensor:
    """Round to float8 e4m3, with one scale for each row: an output of a weight, or a token."""
    return _fp8(_wide(x), dims=(-1,)).to(x.dtype)


def fp8_blocks(weight: Tensor) -> Tensor:
    """Round a weight to float8 e4m3, with one scale for each block of 128 rows and columns; the last blocks may be smaller."""
    rows, columns = weight.shape[-2:]
    wide = F.pad(_wide(weight), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = wide.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK))
    rounded = _fp8(blocks, dims=(-3, -1)).flatten(-4, -3).flatten(-2)
    return rounded[..., :rows, :columns].to(weight.dtype)


def fp8_groups(x: Tensor) -> Tensor:
    """Round inputs to float8 e4m3, with one scale for 128 of them; the last group may be smaller."""
    columns = x.shape[-1]
    groups = F.pad(_wide(x), (0, -columns % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    return _fp8(groups, dims=(-1,)).flatten(-2)[..., :columns].to(x.dtype)


def int4_groups(weight: Tensor, size: int) -> Tensor:
    """Round a weight to the integers -8 to 7, with one scale for ``size`` inputs, which is of the dtype of the weight."""
    groups = _wide(weight).unflatten(-1, (-1, size))
    # 15 steps between -amax and amax. Files have scales in the dtype of the weights.
    scale = (_largest(groups, (-1,)) / 7.5).to(weight.dtype).to(groups.dtype)
    rounded = (groups / scale).round().clamp(-8, 7) * scale
    return rounded.flatten(-2).to(weight.dtype)


def nvfp4_groups(weight: Tensor) -> Tensor:
    """Round a weight to float4 e2m1, with a float8 scale for 16 inputs, which are scaled by one number for each matrix."""
    wide = _wide(weight)
    whole = FP8_MAX * _FP4_MAX / _largest(wide, (-2, -1))[..., None]
    groups = wide.unflatten(-1, (-1, _NVFP4_GROUP))
    scale = _to_e4m3(_largest(groups, (-1,)) / _FP4_MAX * whole)
    # The scale of a group of zeros may round to 0.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale) / whole
    return (_to_e2m1(groups / scale) * scale).flatten(-2).to(weight.dtype)


# ---- parts of the above


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the largest absolute values over some dimensions, which stay; 1 where all are 0."""
    amax = x.abs().amax(dims, keepdim=True)
    return torch.where(amax == 0, torch.ones_like(amax), amax)


def _fp8(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Round to float8 e4m3, with one scale over some dimensions."""
    scale = _largest(x, dims) / FP8_MAX
    return _to_e4m3(x / scale) * scale


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def _to_e2m1(x: Tensor) -> Tensor:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4 and 6, ties to the even mantissa."""
    x = x.clamp(-_FP4_MAX, _FP4_MAX)
    # The distance of neighbours: 0.5 below 2, 1 below 4, then 2.
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0)).to(x.dtype)
    return (x / step).round() * step
