"""The bridge between JAX and torch: a compiled forward whose outputs are torch tensors with a backward.

The forward returns its outputs and what the backward needs: the residuals of the vector-Jacobian product, without those that are
arguments themselves (the weights), which jit would copy. The backward is a second program, which adds to the gradient in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal.engine.jax.lora.factors import StackedFactors, factor_sharding
from areal.engine.jax.mesh import device_view, distinct_shards, to_numpy
from areal.engine.jax.model.attention import Visibility
from areal.engine.jax.model.decoder import Stream
from areal.engine.jax.model.spec import ModelSpec, Params
from areal.engine.jax.model.token_outputs import Outputs, Rows, Wanted, compute_outputs
from areal.engine.jax.model_arrays import ModelState


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["tree", "places"])
@dataclass(frozen=True)
class Residuals:
    """A vector-Jacobian product without the residuals that are arguments of the forward.

    Attributes:
        leaves: the other residuals.
        tree: structure of the product, a function of cotangents.
        places: for each leaf of the structure, its index in the arguments, or ``None``.
    """

    leaves: list[Array]
    tree: Any
    places: tuple[int | None, ...]

    @classmethod
    def of(cls, pull: Callable[..., Any], arguments: Any) -> Residuals:
        """Divide a vector-Jacobian product. Called while a program is traced."""
        index = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(arguments))}
        leaves, tree = jax.tree.flatten(pull)
        places = tuple(index.get(id(leaf)) for leaf in leaves)
        return cls([leaf for leaf, place in zip(leaves, places, strict=True) if place is None], tree, places)

    def restore(self, arguments: Any) -> Callable[..., Any]:
        """Return the product."""
        given, kept = jax.tree.leaves(arguments), iter(self.leaves)
        return jax.tree.unflatten(self.tree, [next(kept) if i is None else given[i] for i in self.places])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(spec: ModelSpec, wanted: Wanted, params: Params, stream: Stream, rows: Rows) -> Outputs:
    # Without a backward, no logits are kept for it.
    return compute_outputs(replace(spec, keep_bytes=0), wanted, params, stream, rows)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(6,), keep_unused=True)
def _forward(
    spec: ModelSpec, wanted: Wanted, params: Params, factors: Params, stream: Stream, rows: Rows, spare: Sequence[Array]
) -> tuple[Outputs, Outputs, Residuals]:
    """Return outputs, those of them that are integers, and residuals, which are written to the memory of ``spare``."""
    return _differentiate(spec, wanted, params, factors, stream, rows)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _differentiate(
    spec: ModelSpec, wanted: Wanted, params: Params, factors: Params, stream: Stream, rows: Rows
) -> tuple[Outputs, Outputs, Residuals]:
    """Compute :func:`_forward`. Its trace, which the shapes of the residuals are read from, is part of that program."""

    def run(trained: Params) -> tuple[Outputs, Outputs]:
        out = compute_outputs(spec, wanted, {**params, **trained}, stream, rows)
        integers = {name: value for name, value in out.items() if not jnp.issubdtype(value.dtype, jnp.floating)}
        return {name: value for name, value in out.items() if name not in integers}, integers

    # With adapters, the parameters are constants.
    out, pull, integers = jax.vjp(run, params if spec.trained else factors, has_aux=True)
    return out, integers, Residuals.of(pull, (params, factors, stream, rows))


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(5,))
def _pull(
    spec: ModelSpec, residuals: Residuals, arguments: Any, cotangents: Outputs, params: Params, grads: Params
) -> Params:
    (new,) = residuals.restore((params, *arguments))(cotangents)
    return {name: spec.place(name, grads[name] + new[name]) for name in grads}


@functools.partial(jax.jit, static_argnums=(0,))
def _pull_factors(
    spec: ModelSpec, residuals: Residuals, arguments: Any, cotangents: Outputs, params: Params
) -> dict[str, Array]:
    (new,) = residuals.restore((params, *arguments))(cotangents)
    return {name: lax.with_sharding_constraint(x, factor_sharding(spec, x.ndim)) for name, x in new.items()}


class ForwardCall:
    """One forward of one micro-batch, with at most one backward.

    Args:
        spec: the model.
        wanted: outputs to compute.
        state: arrays of the model.
        arrays: inputs of all ranks, by name.
        factors: factors of the adapters, if the forward has any.
    """

    def __init__(
        self,
        spec: ModelSpec,
        wanted: Wanted,
        state: ModelState,
        arrays: Mapping[str, Array],
        factors: StackedFactors | None = None,
    ) -> None:
        self._spec, self._wanted, self._state = spec, wanted, state
        self._factors = StackedFactors({}, []) if factors is None else factors
        visibility = Visibility(*(arrays[name] for name in Visibility._fields))
        stream = Stream(arrays["ids"], visibility, arrays.get("slots"), arrays.get("experts"))
        self._inputs = (stream, Rows(*(arrays[name] for name in Rows._fields)))
        self._residuals: Residuals | None = None
        self._like: dict[str, Array] = {}

    def evaluate(self) -> dict[str, Tensor]:
        """Return the outputs of this process's streams, ``[S, R, ...]``, without a graph."""
        with self._spec.numbers.enabled():
            params = {**self._state.params, **self._factors.arrays}
            out = self._spec.finished(_evaluate(self._spec, self._wanted, params, *self._inputs))
        return {name: _local(value) for name, value in out.items()}

    def differentiable(self) -> dict[str, Tensor]:
        """Return the same outputs with a backward, which adds to the gradients of the model or of the factors."""
        arguments = (self._spec, self._wanted, self._state.params, self._factors.arrays, *self._inputs)
        with self._spec.numbers.enabled():
            spare = self._state.spare.take(lambda: _differentiate.eval_shape(*arguments)[2].leaves)
            out, integers, self._residuals = self._spec.finished(_forward(*arguments, spare))
        self._like = out
        # Autograd needs an input that requires a gradient: its own is never computed.
        anchor = torch.zeros((), requires_grad=True)
        tensors = _Bridge.apply(anchor, self, list(out.values()), *self._factors.parameters)
        return {**dict(zip(out, tensors, strict=True)), **{name: _local(value) for name, value in integers.items()}}

    def pull(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Add the gradient of the model for the gradients of the outputs, or return the gradients of the factors.

        Raises:
            RuntimeError: there was a backward already.
        """
        residuals, self._residuals = self._residuals, None
        if residuals is None:
            raise RuntimeError(
                "a second backward through one micro-batch: return one loss, the sum of its terms, and leave backward to the engine"
            )
        spec, state = self._spec, self._state
        streams = len(spec.local_streams)
        cotangents = {
            name: spec.from_local(
                np.zeros((streams, *value.shape[1:]), value.dtype) if grad is None else to_numpy(grad)
            )
            for (name, value), grad in zip(self._like.items(), grads, strict=True)
        }
        arguments = (self._factors.arrays, *self._inputs)
        if not spec.trained:
            with spec.numbers.enabled():
                new = spec.finished(_pull_factors(spec, residuals, arguments, cotangents, state.params))
            gradients = self._factors.gradients(new)
            state.spare.give(residuals.leaves)
            return gradients
        # Donated: until the program returns, there are no gradients.
        with state.replacing_grads() as pending, spec.numbers.enabled():
            state.grads = dict(_pull(spec, residuals, arguments, cotangents, state.params, pending))
        # Programs run in the background: an error of this one, and its time, belong to this micro-batch.
        jax.block_until_ready(state.grads)
        state.spare.give(residuals.leaves)
        return ()


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, call: ForwardCall, outputs: list[Array], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(_local(x) for x in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.call.pull(grads)


def _local(array: Array) -> Tensor:
    """Return a copy of this process's rows of a ``[D, ...]`` array: losses may write into it, and JAX's memory is read-only."""
    rows = [device_view(row) for _, row in distinct_shards(array)]
    return rows[0].clone() if len(rows) == 1 else torch.cat([row.to(rows[0].device) for row in rows])
