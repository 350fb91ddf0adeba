"""Updates of weight matrices by Muon, on whole matrices that are spread over all devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from areal.api.config import TrainEngineConfig
from areal.api.sections.optimizer import MuonConfig
from areal.engine.jax.mesh import AXES, stored_spec
from areal.engine.jax.model.architecture import EXPERTS, LAYER
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.torch.muon.newton_schulz import COEFFICIENTS, SMALLEST_NORM, update_scale

Placement = tuple[tuple[str, ...], ...]
"""Axes of the mesh over which each dimension of a stack of matrices is divided."""


def has_matrices(name: str, shape: Sequence[int]) -> bool:
    """Return whether an array of parameters consists of matrices that Muon updates: weights of layers ``[layers, ..., rows, columns]``."""
    return name.startswith(LAYER) and len(shape) > 2


def check_muon(config: TrainEngineConfig) -> None:
    """Check that the iteration has its dtype.

    Raises:
        ValueError: it is to be float64, and no dtype of the model is.
    """
    kinds = (config.dtype, config.master_dtype, config.grad_reduce_dtype)
    muon = config.optimizer is not None and config.optimizer.type == "muon" and config.optimizer.muon
    if muon and muon.dtype == "float64" and "float64" not in kinds:
        raise ValueError(
            f"optimizer.muon.dtype = 'float64' with master_dtype = {config.master_dtype!r}: the JAX engine has float64 only where a dtype of "
            "the model is float64; choose 'float32'"
        )


def muon_updates(spec: ModelSpec, directions: Mapping[str, Array], config: MuonConfig) -> dict[str, Array]:
    """Return the updates of arrays, by name: directions that are orthogonalised, and scaled by the shape of a matrix.

    Matrices of one shape are one stack. Its matrices are spread over all devices, so that each is computed on one.

    Args:
        spec: the model.
        directions: momenta of arrays with matrices.
        config: settings.
    """
    stacks: dict[tuple[tuple[int, ...], Placement], list[str]] = defaultdict(list)
    for name, x in directions.items():
        stacks[_matrices(name, x).shape[1:], _placement(spec, name, x.shape)].append(name)
    updates = {}
    for (_, placement), names in stacks.items():
        parts = [_matrices(name, directions[name]) for name in names]
        made = _on_all_devices(spec, jnp.concatenate(parts), placement, config)
        ends = [sum(len(part) for part in parts[:n]) for n in range(1, len(parts))]
        for name, own in zip(names, jnp.split(made, ends), strict=True):
            updates[name] = _array(name, own, directions[name].shape)
    return updates


def newton_schulz(x: Array, config: MuonConfig) -> Array:
    """Do what the function of this name in :mod:`areal.engine.torch.muon.newton_schulz` does.

    Args:
        x: ``[..., rows, columns]``.
        config: dtype and number of steps.
    """
    a, b, c = COEFFICIENTS
    y = x.astype(config.dtype)
    tall = x.shape[-2] > x.shape[-1]
    y = y.mT if tall else y
    y = y / jnp.maximum(jnp.linalg.norm(y, axis=(-2, -1), keepdims=True), SMALLEST_NORM)
    for _ in range(config.steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).astype(x.dtype)


def _on_all_devices(spec: ModelSpec, stack: Array, placement: Placement, config: MuonConfig) -> Array:
    """Return the updates of ``[matrices, rows, columns]``, which are placed as their arrays are. Each device computes some of them."""
    n = len(stack)
    x = jnp.pad(stack, [(0, -n % spec.mesh.size), (0, 0), (0, 0)])
    # One dimension after the other: each is an all-to-all of its axes.
    whole, rows, columns = placement
    rest = tuple(axis for axis in AXES if axis not in {*whole, *rows, *columns})
    steps = [(whole, rows, columns), ((*whole, *columns), rows, ()), ((*whole, *columns, *rows), (), ())]
    for step in (*steps, ((*whole, *columns, *rows, *rest), (), ())):
        x = _placed(spec, x, step)
    x = newton_schulz(x, config) * update_scale(x.shape, config)
    for step in reversed(steps):
        x = _placed(spec, x, step)
    return x[:n]


def _placed(spec: ModelSpec, x: Array, placement: Placement) -> Array:
    return lax.with_sharding_constraint(
        x, NamedSharding(spec.mesh, PartitionSpec(*(axes or None for axes in placement)))
    )


def _matrices(name: str, x: Array) -> Array:
    """Return the matrices of an array, ``[matrices, rows, columns]``: gate and up projections of experts are two."""
    *stack, rows, columns = x.shape
    if name.endswith(EXPERTS[0]):
        x, rows = x.reshape(*stack, 2, rows // 2, columns), rows // 2
    # Experts are divided over devices, and layers are not.
    return (jnp.moveaxis(x, 1, 0) if len(stack) == 2 else x).reshape(-1, rows, columns)


def _array(name: str, matrices: Array, shape: Sequence[int]) -> Array:
    """Return an array of its matrices."""
    *stack, rows, columns = shape
    if len(stack) == 1:
        return matrices.reshape(shape)
    layers, experts = stack
    return jnp.moveaxis(matrices.reshape(experts, layers, rows, columns), 0, 1)


def _placement(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Placement:
    """Return the axes over which the matrices of an array are divided: which of a stack, rows and columns."""
    *stack, rows, columns = (
        () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axes in stored_spec(name, shape, spec.mesh)
    )
    return tuple(axis for axes in stack for axis in axes), rows, columns
