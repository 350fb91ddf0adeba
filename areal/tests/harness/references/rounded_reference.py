"""The reference with rounded operands: formats by numpy and ml_dtypes, layers one product at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal.tests.grid.reference import Reference

Rounding = Callable[[np.ndarray], np.ndarray]

FP8, FP4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def as_type(x: np.ndarray, kind: Any) -> np.ndarray:
    """Round to a small type: float32 first, as torch does."""
    largest = float(ml_dtypes.finfo(kind).max)
    return np.clip(x, -largest, largest).astype(np.float32).astype(kind).astype(x.dtype)


def groups(x: np.ndarray, size: int, of_group: Rounding) -> np.ndarray:
    """Round each group of the last dimension of one row after the other."""
    out = x.copy()
    for index in np.ndindex(x.shape[:-1]):
        for start in range(0, x.shape[-1], size):
            part = (*index, slice(start, start + size))
            out[part] = of_group(x[part])
    return out


def fp8(x: np.ndarray) -> np.ndarray:
    """Round an array with one scale."""
    scale = np.abs(x).max() / x.dtype.type(448)
    return as_type(x / scale, FP8) * scale if scale else x


def fp8_blocks(weight: np.ndarray) -> np.ndarray:
    if weight.ndim == 3:
        return np.stack([fp8_blocks(each) for each in weight])
    out = weight.copy()
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            block = (slice(row, row + 128), slice(column, column + 128))
            out[block] = fp8(weight[block])
    return out


def int4(x: np.ndarray) -> np.ndarray:
    """Round a group to 16 integers."""
    scale = np.abs(x).max() / x.dtype.type(7.5)
    return np.clip(np.rint(x / scale), -8, 7) * scale if scale else x


def nvfp4(weight: np.ndarray) -> np.ndarray:
    if weight.ndim == 3:
        return np.stack([nvfp4(each) for each in weight])
    # torch divides a number by a tensor so.
    whole = weight.dtype.type(1) / np.abs(weight).max() * weight.dtype.type(448 * 6)

    def of_group(x: np.ndarray) -> np.ndarray:
        scale = as_type(np.abs(x).max() / 6 * whole, FP8) / whole
        return as_type(x / scale, FP4) * scale if scale else x * 0

    return groups(weight, 16, of_group)


def rounding_of(form: str, group_size: int) -> tuple[Rounding, Rounding | None]:
    """Return the rounding of weights, and that of inputs."""
    return {
        "fp8": (lambda x: groups(x, x.shape[-1], fp8), lambda x: groups(x, x.shape[-1], fp8)),
        "fp8_blocks": (fp8_blocks, lambda x: groups(x, 128, fp8)),
        "int4": (lambda x: groups(x, group_size, int4), None),
        "nvfp4": (nvfp4, None),
    }[form]


def rounded(x: Tensor, rounding: Rounding | None) -> Tensor:
    """Return the rounded tensor with the gradient of ``x``."""
    if rounding is None:
        return x
    value = torch.from_numpy(np.ascontiguousarray(rounding(x.detach().numpy())))
    return x * 0 + (x - x.detach()) + value


class RoundedReference(Reference):
    """A :class:`Reference` whose decoder layers compute with rounded operands.

    Args:
        path: str. Model directory.
        form: format.
        group_size: of int4.
        exclude: last components of the names of linear layers that do not round.
        options: those of the reference.
    """

    def __init__(self, path: str, form: str, group_size: int = 128, exclude: tuple[str, ...] = (), **options: Any):
        super().__init__(path, **options)
        weights, inputs = rounding_of(form, group_size)
        for name, module in self.model.get_decoder().layers.named_modules():
            if name.rpartition(".")[2] in exclude:
                continue
            if isinstance(module, nn.Linear):
                module.forward = lambda x, m=module: F.linear(rounded(x, inputs), rounded(m.weight, weights), m.bias)
            elif hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
                module.forward = lambda *args, m=module: experts(m, *args, weights, inputs)


def experts(module: Any, x: Tensor, chosen: Tensor, scores: Tensor, weights: Rounding, inputs: Rounding | None) -> Any:
    """Compute the experts of one token after the other."""
    up, down = rounded(module.gate_up_proj, weights), rounded(module.down_proj, weights)
    out = []
    for token, ids, factors in zip(x, chosen, scores, strict=True):
        total = torch.zeros_like(token)
        for expert, factor in zip(ids, factors, strict=True):
            gate, value = F.linear(rounded(token, inputs), up[expert]).chunk(2)
            total = total + factor * F.linear(rounded(module.act_fn(gate) * value, inputs), down[expert])
        out.append(total)
    return torch.stack(out)
