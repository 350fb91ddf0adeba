"""The contribution of adapters to the output of a linear layer, as a JAX function.

The factors of all adapters of a forward are stacked, with a slot for each adapter. Products of a token with the factors of other
slots are set to zero, in the forward and in the backward. So the gradient of each adapter is the sum over its own tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

DOWN, UP = "lora_A", "lora_B"
"""Suffixes of the names of the factors ``A`` and ``B``, after the name of the layer."""


@dataclass(frozen=True)
class FactorUse:
    """How the factors of a layer are used. Hashable.

    Attributes:
        dtype: of the operands of products, by name.
        result: dtype of the contribution, by name, which is not rounded to a narrower one.
        reduce: dtype of the sums of gradients, by name.
        by_token: placement of ``[D, T, ...]`` arrays that tensor-parallel ranks do not divide.
    """

    dtype: str
    result: str
    reduce: str
    by_token: NamedSharding


def add_adapters(
    y: Array, x: Array, weights: Mapping[str, Array], name: str, slots: Array | None, use: FactorUse
) -> Array:
    """Return the output ``y`` of a layer for the input ``x``, plus the contribution of its adapters, if it has any.

    Args:
        weights: arrays that may contain the factors of the layer ``name``.
        slots: as for :func:`low_rank`.
    """
    down = weights.get(f"{name}.{DOWN}")
    return y if down is None else y + low_rank(x.astype(use.dtype), down, weights[f"{name}.{UP}"], slots, use)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def low_rank(x: Array, down: Array, up: Array, slots: Array | None, use: FactorUse) -> Array:
    """Return the products of each token with the factors of its slot.

    Args:
        x: ``[D, T, in]``, in the dtype of the operands.
        down: ``[D, S, r, in]``. ``A`` of each slot; data-parallel ranks have different ones.
        up: ``[D, out, S, r]``. ``B`` of each slot, multiplied by the scale of the adapter.
        slots: int32 ``[D, T]``. Slot of each token; ``None`` with a single slot.

    Returns:
        ``[D, T, out]``, in the dtype of the result.
    """
    return _products(x, down, up, slots, use)[0]


def _products(x: Array, down: Array, up: Array, slots: Array | None, use: FactorUse) -> tuple[Array, Array]:
    """Return the output, and the products of each token with the first factors of its slot."""
    low = _of_slots(jnp.einsum("dti,dsri->dtsr", x, down.astype(use.dtype)), slots, use)
    return jnp.einsum("dtsr,dosr->dto", low, up.astype(use.dtype), preferred_element_type=use.result), low


def _forward(
    x: Array, down: Array, up: Array, slots: Array | None, use: FactorUse
) -> tuple[Array, tuple[Array, Array, Array, Array | None, Array]]:
    out, low = _products(x, down, up, slots, use)
    return out, (x, down, up, slots, low)


def _backward(
    use: FactorUse, saved: tuple[Array, Array, Array, Array | None, Array], grad: Array
) -> tuple[Array, Array, Array, None]:
    x, down, up, slots, low = saved
    grad = grad.astype(use.dtype)
    grad_low = _of_slots(jnp.einsum("dto,dosr->dtsr", grad, up.astype(use.dtype)), slots, use)
    grad_x = jnp.einsum("dtsr,dsri->dti", grad_low, down.astype(use.dtype))
    # Sums over tokens are not rounded to the compute dtype.
    grad_down = jnp.einsum("dtsr,dti->dsri", grad_low, x, preferred_element_type=use.reduce)
    grad_up = jnp.einsum("dto,dtsr->dosr", grad, low, preferred_element_type=use.reduce)
    return grad_x, grad_down.astype(down.dtype), grad_up.astype(up.dtype), None


low_rank.defvjp(_forward, _backward)


def _of_slots(low: Array, slots: Array | None, use: FactorUse) -> Array:
    """Keep the columns ``[D, T, S, r]`` of each token's slot. Tensor-parallel ranks have all columns: they are few."""
    if slots is not None:
        low = jnp.where((slots[..., None] == jnp.arange(low.shape[2], dtype=slots.dtype))[..., None], low, 0)
    return jax.lax.with_sharding_constraint(low, use.by_token)
