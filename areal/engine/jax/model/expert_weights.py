"""Weights of experts in a product: their shards gathered in the compute dtype, their gradient summed in the dtype of the reduction."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from areal.engine.jax.mesh import ways

_TOKENS = ("r", "dp", "cp")
"""Axes whose devices have different tokens for the same experts."""


class ExpertWeight(NamedTuple):
    """A weight of experts, on all devices or, inside of ``shard_map``, on one.

    Attributes:
        stored: ``[E, out, in]``, as it is stored. Gets no gradient.
        sums: zeros in the dtype of the reduction: their gradient is the sum over the tokens of each device, then of the weight. ``None`` for a
            frozen weight. ``[r, dp, cp, E, out, in]``, or ``[E, out, in]`` on a device.
    """

    stored: Array
    sums: Array | None


@dataclass(frozen=True)
class ExpertUse:
    """How a weight of experts is used.

    Attributes:
        mesh: the devices.
        stored: placement of the weight and its gradient.
        reduce: dtype of the sum of the gradient, by name; ``None`` for a frozen weight.
    """

    mesh: Mesh | AbstractMesh
    stored: PartitionSpec
    reduce: str | None

    @property
    def shards(self) -> tuple[str, ...]:
        """Axes over which the last dimension is sharded."""
        axes = self.stored[-1] or ()
        return tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if self.mesh.shape[axis] > 1)

    @property
    def specs(self) -> ExpertWeight:
        """Placement of :meth:`weight`."""
        specs = self.stored, PartitionSpec(*_TOKENS, self.stored[0])
        return ExpertWeight(*specs)  # type: ignore[arg-type]

    def weight(self, stored: Array) -> ExpertWeight:
        """Return a stored weight for a product."""
        return ExpertWeight(stored, None if self.reduce is None else _sums(stored, self))


def on_device(weight: ExpertWeight) -> ExpertWeight:
    """Return the weight of one device, inside of ``shard_map``."""
    return weight if weight.sums is None else weight._replace(sums=weight.sums[0, 0, 0])


def cotangent(sums: Array | None) -> ExpertWeight:
    """Return the cotangent of a weight: the stored one has none."""
    return ExpertWeight(None, sums)  # type: ignore[arg-type]


def gather(stored: Array, dtype: jnp.dtype, shards: tuple[str, ...]) -> Array:
    """Return a device's experts whole, in the dtype of the product, inside of ``shard_map``."""
    narrow = stored.astype(dtype)
    return lax.all_gather(narrow, shards, axis=narrow.ndim - 1, tiled=True) if shards else narrow


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sums(stored: Array, use: ExpertUse) -> Array:
    shape = tuple(use.mesh.shape[axis] for axis in _TOKENS)
    zeros = jnp.zeros((*shape, *stored.shape), use.reduce)
    placement: PartitionSpec = use.specs.sums  # type: ignore[assignment]
    return lax.with_sharding_constraint(zeros, NamedSharding(use.mesh, placement))


def _sums_forward(stored: Array, use: ExpertUse) -> tuple[Array, Array]:
    return _sums(stored, use), stored


def _sums_backward(use: ExpertUse, stored: Array, sums: Array) -> tuple[Array]:
    """Return the sum over devices, as the weight is stored: one reduce-scatter."""

    def of_device(local: Array) -> Array:
        total = local[0, 0, 0]
        if use.shards:
            total = lax.psum_scatter(total, use.shards, scatter_dimension=total.ndim - 1, tiled=True)
        rest = tuple(axis for axis in _TOKENS if axis not in use.shards and ways(use.mesh, axis) > 1)
        return lax.psum(total, rest) if rest else total

    run = jax.shard_map(of_device, mesh=use.mesh, in_specs=use.specs.sums, out_specs=use.stored, check_vma=False)
    return (run(sums).astype(stored.dtype),)


_sums.defvjp(_sums_forward, _sums_backward)
