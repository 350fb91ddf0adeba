"""The feed-forward of a mixture of experts: every token is computed by the experts that its router chose; none is dropped.

Tokens are sorted by expert, so that each expert multiplies consecutive rows (Gale et al., 2023). With ``ep`` and ``tp``, a rank holds
some of the experts, computes the tokens that chose them, and the results of the ranks are summed. With ``ep`` its experts may be chosen
by any token of several ranks: it computes as many rows at a time as its own tokens have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from areal.engine.jax.mesh import STREAMS, expert_axes
from areal.engine.jax.model.architecture import EXPERTS, LAYER, ExpertSizes
from areal.engine.jax.model.expert_weights import ExpertUse, ExpertWeight, cotangent, gather, on_device
from areal.engine.jax.model.products import linear
from areal.engine.jax.model.spec import ModelSpec

Weights = Sequence[ExpertWeight]
"""Weights of the gate and up projections, and of the down projection."""

Shards = tuple[tuple[str, ...], ...]
"""Axes over which the last dimension of each of them is sharded."""

_ROWS = 64
"""Rows of one expert that are computed together on a CPU."""


def routed_feed_forward(
    spec: ModelSpec, sizes: ExpertSizes, weights: Mapping[str, Array], x: Array, replayed: Array | None
) -> tuple[Array, Array]:
    """Send tokens to experts.

    Args:
        spec, sizes, weights: the layer.
        x: ``[D, T, H]``.
        replayed: int32 ``[D, T, K]``. Experts of each token, or -1 where the router decides; ``None`` if it decides for all.

    Returns:
        The sum of the chosen experts' outputs ``[D, T, H]``, weighted by the router's probabilities, and the experts ``[D, T, K]``.
    """
    router, gate_up, down = (
        weights[f"mlp.{name}"] for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    )
    logits = linear(x, router, spec.use(f"{LAYER}mlp.gate.weight", router.shape))
    probabilities = jax.nn.softmax(logits.astype(spec.numbers.stats))
    scores, chosen = lax.top_k(probabilities, sizes.per_token)
    if replayed is not None:
        chosen = jnp.where(replayed < 0, chosen, replayed)
        scores = jnp.take_along_axis(probabilities, chosen, -1)
    if sizes.normalized:
        scores /= scores.sum(-1, keepdims=True)
    axes, ranks = expert_axes(spec.mesh, sizes.n_experts), spec.mesh.shape["ep"]
    uses = [_use(spec, name, weight) for name, weight in zip(EXPERTS, (gate_up, down), strict=True)]
    shards = tuple(use.shards for use in uses)

    def of_device(x: Array, chosen: Array, scores: Array, weights: Weights) -> Array:
        # The tokens of all ranks that share the experts, then of each rank its own again.
        x, chosen, scores = (lax.all_gather(each[0], "ep", tiled=True) for each in (x, chosen, scores))
        first = lax.axis_index(axes) * len(weights[0].stored)
        compute = functools.partial(_in_passes, chosen.size // ranks) if ranks > 1 else _experts
        out = compute(shards, x, chosen - first, scores, [on_device(weight) for weight in weights])
        out = lax.psum_scatter(out, "ep", tiled=True)
        return (lax.psum(out, "tp") if "tp" in axes else out)[None]

    streams = PartitionSpec(STREAMS, "cp")

    def run(x: Array, chosen: Array, scores: Array, *stored: Array) -> Array:
        weights = [use.weight(weight) for use, weight in zip(uses, stored, strict=True)]
        on_devices = jax.shard_map(
            of_device,
            mesh=spec.mesh,
            in_specs=(streams, streams, streams, [use.specs for use in uses]),
            out_specs=streams,
            check_vma=False,
        )
        return on_devices(x, chosen, scores, weights)

    return _keeping_own_tokens(spec, run)(x, chosen, scores.astype(x.dtype), gate_up, down), chosen


def _use(spec: ModelSpec, name: str, weight: Array) -> ExpertUse:
    placement = spec.use(f"{LAYER}{name}", weight.shape).stored.spec
    return ExpertUse(spec.mesh, placement, spec.numbers.reduce if spec.trained else None)


def _keeping_own_tokens(spec: ModelSpec, run: Callable[..., Array]) -> Callable[..., Array]:
    """Return the function, computed again in the backward where a device has rows for the tokens of all ranks of ``ep``.

    Without it, a device would keep as many rows as all of these ranks together without ``ep``, since no token may be dropped.
    """
    return jax.checkpoint(run) if spec.mesh.shape["ep"] > 1 and not spec.recompute else run


def _experts(shards: Shards, x: Array, chosen: Array, scores: Array, weights: Weights) -> Array:
    """Compute the experts ``0 <= chosen < E`` of a device for tokens ``[T, H]``; others belong to another device."""
    n_experts, per_token = len(weights[0].stored), chosen.shape[1]
    order, counts = _by_expert(chosen, n_experts)
    tokens = order // per_token
    return jnp.zeros_like(x).at[tokens].add(_rows(shards, counts, x[tokens], scores.reshape(-1)[order], weights))


def _by_expert(chosen: Array, n_experts: int) -> tuple[Array, Array]:
    """Return the indices of all choices ``[T, K]``, sorted by expert, then those of other devices; and the number of each expert's."""
    expert = jnp.where((chosen >= 0) & (chosen < n_experts), chosen, n_experts).reshape(-1)
    return jnp.argsort(expert), jnp.bincount(expert, length=n_experts + 1)[:-1].astype(jnp.int32)


def _rows(shards: Shards, counts: Array, x: Array, scores: Array, weights: Weights) -> Array:
    """Return the weighted outputs of rows ``[N, H]``, sorted by expert."""
    (gate_up, down), (of_gate_up, of_down) = weights, shards
    gate, up = jnp.split(grouped_linear(x, gate_up, counts, of_gate_up), 2, -1)
    return grouped_linear(jax.nn.silu(gate) * up, down, counts, of_down) * scores[:, None]


_WHOLE: Shards = ((), ())


def _gathered(weights: Weights, dtype: jnp.dtype, shards: Shards) -> Weights:
    """Return weights without shards: devices make different numbers of passes, in which none can wait for others."""
    return [w._replace(stored=gather(w.stored, dtype, axes)) for w, axes in zip(weights, shards, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_passes(rows: int, shards: Shards, x: Array, chosen: Array, scores: Array, weights: Weights) -> Array:
    """Compute :func:`_experts`, ``rows`` rows at a time, in as many passes as there are rows. The backward computes them again."""
    n_passes, of_pass = _passes(rows, chosen, len(weights[0].stored))
    whole = _gathered(weights, x.dtype, shards)

    def add(i: Array, out: Array) -> Array:
        choices, tokens, counts = of_pass(i)
        return out.at[tokens].add(_rows(_WHOLE, counts, x[tokens], scores.reshape(-1)[choices], whole))

    return lax.fori_loop(0, n_passes, add, jnp.zeros_like(x))


_Inputs = tuple[Array, Array, Array, Weights]


def _passes_forward(rows: int, shards: Shards, *inputs: Any) -> tuple[Array, _Inputs]:
    return _in_passes(rows, shards, *inputs), inputs  # type: ignore[return-value]


def _passes_backward(rows: int, shards: Shards, inputs: _Inputs, grad: Array) -> tuple[Array, None, Array, Weights]:
    x, chosen, scores, weights = inputs
    n_passes, of_pass = _passes(rows, chosen, len(weights[0].stored))
    whole = _gathered(weights, x.dtype, shards)
    trained = [weight.sums for weight in weights]

    def add(i: Array, sums: tuple[Array, Array, list[Array | None]]) -> tuple[Array, Array, list[Array | None]]:
        of_x, of_scores, of_weights = sums
        choices, tokens, counts = of_pass(i)

        def run(x: Array, scores: Array, trained: list[Array | None]) -> Array:
            return _rows(
                _WHOLE, counts, x, scores, [w._replace(sums=its) for w, its in zip(whole, trained, strict=True)]
            )

        _, pull = jax.vjp(run, x[tokens], scores.reshape(-1)[choices], trained)
        to_x, to_scores, to_weights = pull(grad[tokens])
        return (
            of_x.at[tokens].add(to_x),
            of_scores.at[choices].set(to_scores),
            jax.tree.map(jnp.add, of_weights, to_weights),
        )

    zeros = jax.tree.map(jnp.zeros_like, (x, scores.reshape(-1), trained))
    of_x, of_scores, of_weights = lax.fori_loop(0, n_passes, add, zeros)
    return of_x, None, of_scores.reshape(scores.shape), [cotangent(total) for total in of_weights]


_in_passes.defvjp(_passes_forward, _passes_backward)


def _passes(rows: int, chosen: Array, n_experts: int) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Divide the choices of a device's experts.

    Args:
        rows: choices of a pass; divides their number.
        chosen: int ``[T, K]``, as for :func:`_experts`.

    Returns:
        The number of passes, and a function that returns of a pass the indices of its choices, their tokens and the rows of each expert.
    """
    order, counts = _by_expert(chosen, n_experts)
    ends = jnp.cumsum(counts)

    def of_pass(i: Array) -> tuple[Array, Array, Array]:
        first = i * rows
        choices = lax.dynamic_slice_in_dim(order, first, rows)
        of_experts = jnp.clip(ends, first, first + rows) - jnp.clip(ends - counts, first, first + rows)
        return choices, choices // chosen.shape[1], of_experts.astype(jnp.int32)

    return -(-ends[-1] // rows), of_pass


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_linear(x: Array, weight: ExpertWeight, counts: Array, shards: tuple[str, ...]) -> Array:
    """Multiply consecutive groups of rows by one weight each.

    Args:
        x: ``[N, in]``, sorted by group.
        weight: ``[E, out, in]``.
        counts: int32 ``[E]``. Rows of each group. Rows after the last group give zeros.
        shards: axes over which the last dimension of the weight is sharded. It is gathered for each product.

    Returns:
        ``[N, out]`` in the dtype of ``x``.
    """
    whole = gather(weight.stored, x.dtype, shards)
    return lax.platform_dependent(x, whole, counts, cpu=_product_by_blocks, default=_product)


_Saved = tuple[tuple[Array, Array] | None, Array, Array]
"""The input and a zero in the dtype of the gradient's sum, of a weight that is trained; the stored weight; the rows of each group."""


def _grouped_forward(x: Array, weight: ExpertWeight, counts: Array, shards: tuple[str, ...]) -> tuple[Array, _Saved]:
    trained = None if weight.sums is None else (x, jnp.zeros((), weight.sums.dtype))
    return grouped_linear(x, weight, counts, shards), (trained, weight.stored, counts)


def _grouped_backward(shards: tuple[str, ...], saved: _Saved, grad: Array) -> tuple[Array, ExpertWeight, None]:
    trained, stored, counts = saved
    transposed = gather(stored, grad.dtype, shards).swapaxes(1, 2)
    grad_x = lax.platform_dependent(grad, transposed, counts, cpu=_product_by_blocks, default=_product)
    if trained is None:
        return grad_x, cotangent(None), None
    x, like = trained
    by_blocks, at_once = (functools.partial(f, dtype=like.dtype) for f in (_outer_by_blocks, _outer))
    sums = lax.platform_dependent(grad, x, counts, cpu=by_blocks, default=at_once)
    return grad_x, cotangent(sums), None


grouped_linear.defvjp(_grouped_forward, _grouped_backward)


# ---- on accelerators: one grouped product


def _precision(x: Array) -> lax.Precision:
    """Return the precision of a product. A TPU has no kernel for grouped products of bfloat16 in the highest one, which adds nothing there."""
    return lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else lax.Precision.HIGHEST


def _product(x: Array, weight: Array, counts: Array) -> Array:
    return lax.ragged_dot(x, weight.swapaxes(1, 2), counts, precision=_precision(x)).astype(x.dtype)


def _outer(grad: Array, x: Array, counts: Array, dtype: jnp.dtype) -> Array:
    """Return the sum over the rows of each group of ``grad`` times ``x``, ``[E, out, in]``."""
    contract_rows = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return lax.ragged_dot_general(grad, x, counts, contract_rows, precision=_precision(x), preferred_element_type=dtype)


# ---- on a CPU: blocks of rows, in a loop as long as there are rows


def _blocks(counts: Array) -> tuple[Array, Array, Array]:
    """Return for each group its first row and its first block, and the number of all blocks."""
    blocks = -(-counts // _ROWS)
    return jnp.cumsum(counts) - counts, jnp.cumsum(blocks) - blocks, blocks.sum()


def _block(b: Array, counts: Array, starts: Array, firsts: Array) -> tuple[Array, Array, Array]:
    """Return the group of a block, its first row, and which of its rows belong to the group."""
    # The last of the groups that begin at or before this block: empty ones begin where the next one does.
    group = jnp.searchsorted(firsts, b, side="right") - 1
    offset = (b - firsts[group]) * _ROWS
    return group, starts[group] + offset, (offset + jnp.arange(_ROWS) < counts[group])[:, None]


def _padded(x: Array) -> Array:
    return jnp.pad(x, ((0, _ROWS), (0, 0)))


def _product_by_blocks(x: Array, weight: Array, counts: Array) -> Array:
    starts, firsts, n_blocks = _blocks(counts)
    rows, out = _padded(x), jnp.zeros((len(x) + _ROWS, weight.shape[1]), x.dtype)

    def add(b: Array, out: Array) -> Array:
        group, start, mine = _block(b, counts, starts, firsts)
        product = lax.dynamic_slice_in_dim(rows, start, _ROWS) @ weight[group].T
        # A block may end in the next group's rows: those stay as they are.
        before = lax.dynamic_slice_in_dim(out, start, _ROWS)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, product, before), start, 0)

    return lax.fori_loop(0, n_blocks, add, out)[: len(x)]


def _outer_by_blocks(grad: Array, x: Array, counts: Array, dtype: jnp.dtype) -> Array:
    starts, firsts, n_blocks = _blocks(counts)
    left, right = _padded(grad), _padded(x)

    def add(b: Array, out: Array) -> Array:
        group, start, mine = _block(b, counts, starts, firsts)
        a = jnp.where(mine, lax.dynamic_slice_in_dim(left, start, _ROWS), 0)
        product = jnp.einsum(
            "no,ni->oi", a, lax.dynamic_slice_in_dim(right, start, _ROWS), preferred_element_type=dtype
        )
        return out.at[group].add(product)

    return lax.fori_loop(0, n_blocks, add, jnp.zeros((len(counts), grad.shape[1], x.shape[1]), dtype))
