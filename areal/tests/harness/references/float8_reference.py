"""The reference with float8 products: operands by numpy and ml_dtypes, one sequence at a time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from areal.tests.grid.reference import Reference
from areal.tests.harness.references.rounded_reference import FP8, as_type

WIDE = ml_dtypes.float8_e5m2


def scaled(x: np.ndarray, kind: Any, power_of_two: bool, axis: int | None) -> np.ndarray:
    """Round numbers that share a scale. torchao multiplies by the inverse of a scale."""
    largest = float(ml_dtypes.finfo(kind).max)
    amax = np.maximum(np.abs(x).max(axis=axis, keepdims=True).astype(np.float64), 1e-12)
    inverse = (largest / amax).astype(np.float32)
    inverse = np.exp2(np.floor(np.log2(inverse))) if power_of_two else inverse
    return (as_type(x.astype(np.float32) * inverse, kind) / inverse).astype(x.dtype)


def rows(x: np.ndarray) -> np.ndarray:
    """Round with a power of two for each row."""
    return scaled(x, FP8, True, -1)


def blocks(x: np.ndarray) -> np.ndarray:
    """Round 32 numbers of a row with the smallest power of two that lets none overflow."""
    grouped = x.reshape(len(x), -1, 32)
    amax = np.abs(grouped).max(axis=-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(np.where(amax == 0, 448, amax) / np.float32(448))))
    return (as_type(grouped / scale, FP8) * scale).reshape(x.shape).astype(x.dtype)


def columns(x: np.ndarray) -> np.ndarray:
    return rows(x.T).T


def blocks_of_columns(x: np.ndarray) -> np.ndarray:
    # Rows are filled up to a multiple of 32.
    filled = np.concatenate([x, np.zeros((-len(x) % 32, x.shape[1]), x.dtype)])
    return blocks(filled.T).T[: len(x)]


def whole(x: np.ndarray) -> np.ndarray:
    return scaled(x, FP8, False, None)


def whole_wide(x: np.ndarray) -> np.ndarray:
    return scaled(x, WIDE, False, None)


def same(x: np.ndarray) -> np.ndarray:
    return x


# Of each product its two operands: inputs and weight, gradient and weight, gradient and inputs. Arrays are [rows, in], [out, in], [rows, out].
RECIPES: dict[str, tuple[Any, ...]] = {
    "tensorwise": (whole, whole, whole_wide, whole, whole_wide, whole),
    "rowwise": (rows, rows, rows, columns, columns, columns),
    "rowwise_with_gw_hp": (rows, rows, rows, lambda weight: scaled(weight, FP8, True, None), same, same),
    "mxfp8": (blocks, blocks, blocks, blocks_of_columns, blocks_of_columns, blocks_of_columns),
    "mxfp8_with_gw_hp": (blocks, blocks, blocks, blocks_of_columns, same, same),
}


class Float8Product(torch.autograd.Function):
    """``x @ weight.T`` with the operands of a recipe, in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return product(x, weight.T, RECIPES[recipe][0], lambda w: RECIPES[recipe][1](w.T).T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), (_, _, *of) = ctx.saved_tensors, RECIPES[ctx.recipe]
        grad = grads[0]
        return (
            product(grad, weight, of[0], of[1]),
            product(grad.T, x, lambda g: of[2](g.T).T, of[3]),
            None,
        )


def product(a: Tensor, b: Tensor, round_a: Any, round_b: Any) -> Tensor:
    left, right = round_a(a.numpy()), round_b(b.numpy())
    return torch.from_numpy(left.astype(np.float64) @ right.astype(np.float64)).to(a.dtype)


class Float8Reference(Reference):
    """A :class:`Reference` whose linear layers of the decoder multiply float8 numbers.

    Args:
        path: str. Model directory.
        recipe: recipe of torchao.
        exclude: last components of the names of linear layers that are left as they are.
        options: those of the reference.
    """

    def __init__(self, path: str, recipe: str, exclude: tuple[str, ...] = (), **options: Any):
        super().__init__(path, **options)
        for name, module in self.model.get_decoder().layers.named_modules():
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in exclude:
                module.forward = lambda x, m=module: linear(x, m, recipe)


def experts_forward(module: Any, x: Tensor, chosen: Tensor, scores: Tensor, recipe: str) -> Tensor:
    """Compute experts of transformers with float8 products, one token after the other."""
    up, down = module.gate_up_proj, module.down_proj
    out = []
    for token, ids, factors in zip(x, chosen, scores, strict=True):
        total = torch.zeros_like(token)
        for expert, factor in zip(ids, factors, strict=True):
            gate, value = Float8Product.apply(token[None], up[expert], recipe).chunk(2, dim=-1)
            hidden = module.act_fn(gate) * value
            total = total + factor * Float8Product.apply(hidden, down[expert], recipe)[0]
        out.append(total)
    return torch.stack(out)


def linear(x: Tensor, module: nn.Linear, recipe: str) -> Tensor:
    out: Tensor = Float8Product.apply(x.flatten(0, -2), module.weight, recipe)
    out = out.unflatten(0, x.shape[:-1])
    return out if module.bias is None else out + module.bias
