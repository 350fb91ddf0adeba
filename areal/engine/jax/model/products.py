"""Uses of a weight in a model: the forward in the compute dtype, the gradient in the dtype of the reduction.

Weights are stored in the master dtype, in shards. Each use casts and gathers them, and its backward sums the gradient over
tokens and devices in :attr:`Numbers.reduce`. So the gradient of a bfloat16 model is rounded to bfloat16 nowhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from areal.engine.jax.mesh import SHARDS, STREAMS, ways


@dataclass(frozen=True)
class Numbers:
    """Dtypes of a model, by name.

    Attributes:
        compute: of activations and matrix products.
        master: of parameters, gradients and optimizer state.
        reduce: of the sums of gradients.
    """

    compute: str
    master: str
    reduce: str

    @property
    def updates(self) -> jnp.dtype:
        """Dtype of factors of adapters, and of the arithmetic of optimizers: float32, or float64 with float64 parameters."""
        return jnp.promote_types(self.master, jnp.float32)

    @property
    def stats(self) -> jnp.dtype:
        """Dtype of norms, softmax and outputs: float32, or float64 in a float64 model."""
        return jnp.promote_types(self.compute, jnp.float32)

    @property
    def wide(self) -> bool:
        """Whether a dtype is float64."""
        return "float64" in (self.compute, self.master, self.reduce)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Allow float64 inside if a dtype is float64, and compute float32 in float32. Both settings are of a thread."""
        with jax.enable_x64(self.wide), jax.default_matmul_precision("highest"):
            yield


@dataclass(frozen=True)
class WeightUse:
    """How a weight is used.

    Attributes:
        dtype: of the operands of the product, by name.
        result: dtype of the product, by name, which is not rounded to a narrower one.
        reduce: dtype of the sum of the gradient, by name.
        stored: placement of the weight and its gradient.
        gathered: placement of the weight in the product.
        trained: whether the weight gets a gradient. A frozen one does not, and its input is not kept for the backward.
        input_first: compute the gradient as ``[in, out]``. XLA transposes the first operand of that product on a CPU, which is to be
            the narrower one.
    """

    dtype: str
    result: str
    reduce: str
    stored: NamedSharding
    gathered: NamedSharding
    trained: bool = True
    input_first: bool = False

    def gather(self, weight: Array) -> Array:
        """Return the weight in the dtype and the placement of the product."""
        return jax.lax.with_sharding_constraint(weight.astype(self.dtype), self.gathered)

    def sum(self, gradient: Array, weight: Array) -> Array:
        """Return the gradient as the weight is stored. The partitioner inserts the reduction over devices here."""
        placed = jax.lax.with_sharding_constraint(gradient.astype(self.reduce), self.stored)
        return placed.astype(weight.dtype)

    @property
    def by_device(self) -> NamedSharding:
        """Placement of ``[D, C, out, in]`` or ``[D, C, in, out]`` arrays: a sum for each of the devices that have different tokens."""
        spec = self.gathered.spec
        return NamedSharding(
            self.stored.mesh, PartitionSpec(STREAMS, "cp", *(reversed(spec) if self.input_first else spec))
        )

    def sum_of_devices(self, sums: Array, weight: Array) -> Array:
        """Return the sum of :attr:`by_device` arrays over devices, as the weight is stored: one reduce-scatter."""
        mesh, spec = self.stored.mesh, self.stored.spec

        def of_device(local: Array) -> Array:
            total = local[0, 0].T if self.input_first else local[0, 0]
            if ways(mesh, SHARDS) > 1 and SHARDS in spec:
                total = lax.psum_scatter(total, SHARDS, scatter_dimension=spec.index(SHARDS), tiled=True)
            elif ways(mesh, SHARDS) > 1:
                total = lax.psum(total, SHARDS)
            return lax.psum(total, "r") if mesh.shape["r"] > 1 else total

        run = jax.shard_map(of_device, mesh=mesh, in_specs=self.by_device.spec, out_specs=spec, check_vma=False)
        return run(sums).astype(weight.dtype)


def linear(x: Array, weight: Array, use: WeightUse) -> Array:
    """Return ``x @ weight.T`` for ``x`` ``[D, T, in]`` and ``weight`` ``[out, in]``."""
    return _trained_linear(x, weight, use) if use.trained else _frozen_linear(x.astype(use.dtype), weight, use)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _trained_linear(x: Array, weight: Array, use: WeightUse) -> Array:
    return _product(x, use.gather(weight), use)


def _linear_forward(x: Array, weight: Array, use: WeightUse) -> tuple[Array, tuple[Array, Array]]:
    return _trained_linear(x, weight, use), (x, weight)


def _linear_backward(use: WeightUse, saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = saved
    grad = grad.astype(use.dtype)
    grad_x = _gradient_of_input(grad, use.gather(weight), use).astype(x.dtype)
    x = x.astype(use.dtype)
    if use.input_first:
        grad_weight = _summed_over_rows("dit,dto->io", x, grad, use).T
    else:
        grad_weight = jnp.einsum("dto,dti->oi", grad, x, preferred_element_type=use.reduce)
    return grad_x, use.sum(grad_weight, weight)


_trained_linear.defvjp(_linear_forward, _linear_backward)


def _product(x: Array, gathered: Array, use: WeightUse) -> Array:
    return jnp.einsum("dti,oi->dto", x.astype(use.dtype), gathered, preferred_element_type=use.result)


def _gradient_of_input(grad: Array, gathered: Array, use: WeightUse) -> Array:
    """Return the gradient of the input, from that of the product in the dtype of the operands. Its sum has the dtype of the product."""
    return jnp.einsum("dto,oi->dti", grad, gathered, preferred_element_type=use.result)


def _summed_over_rows(order: str, x: Array, grad: Array, use: WeightUse) -> Array:
    """Return the gradient ``[..., in, out]`` of a weight, from ``x`` ``[..., T, in]`` and ``grad`` ``[..., T, out]``.

    XLA leaves a product over the rows of both operands to a library of a third of the rate: ``order`` is of ``x`` transposed. The barrier
    keeps XLA from exchanging the operands instead of transposing the result.
    """
    return lax.optimization_barrier(jnp.einsum(order, x.swapaxes(-1, -2), grad, preferred_element_type=use.reduce))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _frozen_linear(x: Array, weight: Array, use: WeightUse) -> Array:
    return _product(x, use.gather(weight), use)


def _frozen_forward(x: Array, weight: Array, use: WeightUse) -> tuple[Array, Array]:
    return _frozen_linear(x, weight, use), weight


def _frozen_backward(use: WeightUse, weight: Array, grad: Array) -> tuple[Array, None]:
    return _gradient_of_input(grad.astype(use.dtype), use.gather(weight), use).astype(use.dtype), None


_frozen_linear.defvjp(_frozen_forward, _frozen_backward)


# ---- a weight in a loop over chunks of tokens


Product = Callable[[Array, Array | None], Array]
"""Function ``x @ weight.T`` of ``x`` ``[D, T, in]``, and of the result if it is known. The backward is the same."""


def gathered_linear(weight: Array, use: WeightUse) -> Product:
    """Gather a weight for a loop over chunks of tokens. The gradient is summed over devices after the loop.

    Args:
        weight: ``[out, in]``, as it is stored.
        use: its use.

    Returns:
        The product with the weight, of tokens that are divided over ``cp``.
    """
    gathered = lax.stop_gradient(use.gather(weight))
    sums = _device_sums(weight, use) if use.trained else None
    return lambda x, known: _loop_linear(x, gathered, sums, known, use)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _device_sums(weight: Array, use: WeightUse) -> Array:
    """Return zeros, placed by :attr:`WeightUse.by_device`: their gradient is the sum over the tokens of each device, then of the weight."""
    mesh = use.stored.mesh
    shape = reversed(weight.shape) if use.input_first else weight.shape
    zeros = jnp.zeros((ways(mesh, STREAMS), mesh.shape["cp"], *shape), use.reduce)
    return lax.with_sharding_constraint(zeros, use.by_device)


def _device_sums_forward(weight: Array, use: WeightUse) -> tuple[Array, Array]:
    return _device_sums(weight, use), weight


def _device_sums_backward(use: WeightUse, weight: Array, sums: Array) -> tuple[Array]:
    return (use.sum_of_devices(sums, weight),)


_device_sums.defvjp(_device_sums_forward, _device_sums_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loop_linear(x: Array, weight: Array, sums: Array | None, known: Array | None, use: WeightUse) -> Array:
    return _product(x, weight, use) if known is None else known


def _loop_forward(
    x: Array, weight: Array, sums: Array | None, known: Array | None, use: WeightUse
) -> tuple[Array, tuple[Array, Array]]:
    return _loop_linear(x, weight, sums, known, use), (x, weight)


def _loop_backward(use: WeightUse, saved: tuple[Array, Array], grad: Array) -> tuple[Array, None, Array | None, None]:
    x, weight = saved
    grad = grad.astype(use.dtype)
    grad_x = _gradient_of_input(grad, weight, use).astype(x.dtype)
    if not use.trained:
        return grad_x, None, None, None
    # No sum over devices here: it would be one for each chunk.
    parts = use.stored.mesh.shape["cp"]
    grad, x = (each.reshape(len(each), parts, -1, each.shape[-1]) for each in (grad, x.astype(use.dtype)))
    if use.input_first:
        sums = _summed_over_rows("dcit,dcto->dcio", x, grad, use)
    else:
        sums = jnp.einsum("dcti,dcto->dcoi", x, grad, preferred_element_type=use.reduce)
    return grad_x, None, lax.with_sharding_constraint(sums, use.by_device), None


_loop_linear.defvjp(_loop_forward, _loop_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(ids: Array, weight: Array, ignored: int | None, use: WeightUse) -> Array:
    """Return rows of ``weight`` ``[V, H]`` for ``ids`` int32 ``[D, T]``. The row ``ignored`` gets no gradient."""
    return use.gather(weight)[ids]


def _lookup_forward(
    ids: Array, weight: Array, ignored: int | None, use: WeightUse
) -> tuple[Array, tuple[Array, Array]]:
    return lookup(ids, weight, ignored, use), (ids, weight)


def _lookup_backward(
    ignored: int | None, use: WeightUse, saved: tuple[Array, Array], grad: Array
) -> tuple[None, Array]:
    ids, weight = saved
    grad = grad.astype(use.reduce)
    if ignored is not None:
        grad = jnp.where((ids == ignored)[..., None], 0, grad)
    total = jnp.zeros(weight.shape, use.reduce).at[ids.reshape(-1)].add(grad.reshape(-1, grad.shape[-1]))
    return None, use.sum(total, weight)


lookup.defvjp(_lookup_forward, _lookup_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scaled(x: Array, weight: Array, use: WeightUse) -> Array:
    """Return ``x * weight`` for ``x`` ``[..., H]`` and ``weight`` ``[H]``."""
    return x * use.gather(weight)


def _scale_forward(x: Array, weight: Array, use: WeightUse) -> tuple[Array, tuple[Array | None, Array]]:
    return scaled(x, weight, use), (x if use.trained else None, weight)


def _scale_backward(use: WeightUse, saved: tuple[Array | None, Array], grad: Array) -> tuple[Array, Array | None]:
    x, weight = saved
    if x is None:
        return grad * use.gather(weight), None
    over = tuple(range(x.ndim - 1))
    return grad * use.gather(weight), use.sum((grad.astype(use.reduce) * x.astype(use.reduce)).sum(over), weight)


scaled.defvjp(_scale_forward, _scale_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def shifted(x: Array, bias: Array, use: WeightUse) -> Array:
    """Return ``x + bias`` for ``x`` ``[..., H]`` and ``bias`` ``[H]``."""
    return x + use.gather(bias)


def _shift_forward(x: Array, bias: Array, use: WeightUse) -> tuple[Array, Array]:
    return shifted(x, bias, use), bias


def _shift_backward(use: WeightUse, bias: Array, grad: Array) -> tuple[Array, Array | None]:
    if not use.trained:
        return grad, None
    return grad, use.sum(grad.astype(use.reduce).sum(tuple(range(grad.ndim - 1))), bias)


shifted.defvjp(_shift_forward, _shift_backward)
