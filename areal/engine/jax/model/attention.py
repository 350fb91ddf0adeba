"""Attention of packed sequences and of shared prefixes, whose cost follows the sequences and not the square of the stream.

The tokens of a stream form a tree, in which a token's parent is the token before it, and stand in the order of a depth-first walk.
The tokens that see token ``k`` therefore follow it without a gap: token ``q`` sees it where ``k <= q < leave[k]``. Without shared
prefixes, ``leave`` is the end of the sequence.

Queries are computed in blocks, and each block visits only the blocks of keys from the beginning of its sequences on (Dao et
al., 2022, without the tiling of a GPU). The backward computes the weights of attention again from the log-sum-exp of each row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = "attention"
"""Name of the results of attention, which may be kept for the backward."""

BLOCK = 128
"""Queries, and keys, that are computed together. The length of a longer stream is a multiple."""

_CPU_BLOCK = 64
"""The same on a CPU, whose products need no larger operands: fewer scores of other sequences are computed."""


class Visibility(NamedTuple):
    """Which tokens of a stream see which; all int32.

    Attributes:
        leave: ``[T]``. Place after the last token that sees this one.
        positions: ``[T]``. Positions of the tokens in their sequences.
        first: ``[T / block]``. For each block of queries, the first block with a key that one of them sees. A block has
            :func:`block_on` tokens, or all queries of a device if those are fewer.
    """

    leave: Array
    positions: Array
    first: Array

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return len(self.leave) // len(self.first)


def block_on(platform: str) -> int:
    """Return the tokens of a block on devices of a platform, as JAX names it."""
    return _CPU_BLOCK if platform == "cpu" else BLOCK


class _Saved(NamedTuple):
    q: Array
    k: Array
    v: Array
    visibility: Visibility
    window: Array
    first_query: Array
    out: Array
    lse: Array


@jax.custom_vjp
def attention(q: Array, k: Array, v: Array, visibility: Visibility, window: Array, first_query: Array) -> Array:
    """Return the attention of some tokens of one stream, consecutive ones, to all of its tokens.

    Args:
        q: ``[Q, N, G, d]``. Queries of ``G`` heads for each of ``N`` key heads; ``Q`` is at most a block, or whole blocks.
        k, v: ``[T, N, d]``.
        window: int32 scalar. A token sees at most so many tokens, itself included.
        first_query: int32 scalar. Place of the first query in the stream.

    Returns:
        ``[Q, N, G, d]``, in the dtype of ``q``.
    """
    return _forward(q, k, v, visibility, window, first_query)[0]


def _forward(
    q: Array, k: Array, v: Array, visibility: Visibility, window: Array, first_query: Array
) -> tuple[Array, _Saved]:
    tokens, n, g, d = q.shape
    block = visibility.block
    before = first_query // block
    stats = jnp.promote_types(q.dtype, jnp.float32)
    queries, keys, values = _by_heads(q), _by_heads(k), v.transpose(1, 2, 0)

    def of_block(own: Array) -> tuple[Array, Array]:
        rows, b = _rows(queries, own, block), before + own

        def add_keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            scores = _scores(rows, _rows(keys, j, block), visibility, b, j, window, block)
            new_top = jnp.maximum(top, scores.max(1))
            weights, kept = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
            product = jnp.einsum(
                "ndk,nkgq->ndgq", _places(values, j, block), weights.astype(v.dtype), preferred_element_type=stats
            )
            return new_top, total * kept + weights.sum(1), out * kept[:, None] + product

        # The least number instead of an infinity: the weights of a row without a visible key so far are zero.
        least = jnp.full((n, g, block), jnp.finfo(stats).min, stats)
        start = (least, jnp.zeros_like(least), jnp.zeros((n, d, g, block), stats))
        top, total, out = lax.fori_loop(visibility.first[b], b + 1, add_keys, start)
        return (out / total[:, None]).transpose(3, 0, 2, 1).astype(q.dtype), top + jnp.log(total)

    out, lse = lax.map(of_block, jnp.arange(tokens // block, dtype=jnp.int32))
    out, lse = (checkpoint_name(each, ATTENTION) for each in (out.reshape(q.shape), lse))
    return out, _Saved(q, k, v, visibility, window, first_query, out, lse)


def _backward(saved: _Saved, grad: Array) -> tuple[Array, Array, Array, None, None, None]:
    q, k, v, visibility, window, first_query, out, all_lse = saved
    tokens, n, g, d = q.shape
    block = visibility.block
    before, stats = first_query // block, all_lse.dtype
    # The gradient of a softmax subtracts the mean of the gradients of its weights, which is this product.
    means = jnp.einsum("qngd,qngd->ngq", grad.astype(stats), out.astype(stats))
    all_queries, all_keys, all_values, all_grads = _by_heads(q), _by_heads(k), _by_heads(v), _by_heads(grad)
    transposed = k.transpose(1, 2, 0)

    def of_block(carry: tuple[Array, Array], own: Array) -> tuple[tuple[Array, Array], Array]:
        queries, grads, lse = _rows(all_queries, own, block), _rows(all_grads, own, block), all_lse[own]
        mean, b = _places(means, own, block), before + own

        def add_keys(j: Array, inner: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            grad_q, grad_k, grad_v = inner
            keys, values = _rows(all_keys, j, block), _rows(all_values, j, block)
            weights = jnp.exp(_scores(queries, keys, visibility, b, j, window, block) - lse[:, None])
            of_weights = jnp.einsum("nkd,ngqd->nkgq", values, grads, preferred_element_type=stats)
            of_scores = (weights * (of_weights - mean[:, None]) * d**-0.5).astype(q.dtype)
            grad_q += jnp.einsum(
                "ndk,nkgq->ndgq", _places(transposed, j, block), of_scores, preferred_element_type=stats
            )
            of_keys = jnp.einsum("nkgq,ngqd->nkd", of_scores, queries, preferred_element_type=stats)
            of_values = jnp.einsum("nkgq,ngqd->nkd", weights.astype(q.dtype), grads, preferred_element_type=stats)
            return grad_q, _add_rows(grad_k, of_keys, j), _add_rows(grad_v, of_values, j)

        start = (jnp.zeros((n, d, g, block), stats), *carry)
        grad_q, grad_k, grad_v = lax.fori_loop(visibility.first[b], b + 1, add_keys, start)
        return (grad_k, grad_v), grad_q.transpose(3, 0, 2, 1).astype(q.dtype)

    zeros = (jnp.zeros(all_keys.shape, stats), jnp.zeros(all_values.shape, stats))
    (grad_k, grad_v), grad_q = lax.scan(of_block, zeros, jnp.arange(tokens // block, dtype=jnp.int32))
    grad_k, grad_v = (each.swapaxes(0, 1).astype(k.dtype) for each in (grad_k, grad_v))
    return grad_q.reshape(q.shape), grad_k, grad_v, None, None, None


attention.defvjp(_forward, _backward)


def _scores(
    queries: Array, keys: Array, visibility: Visibility, b: Array, j: Array, window: Array, block: int
) -> Array:
    """Return the scores ``[N, keys, G, queries]`` of two blocks, ``-inf`` where a key is not visible."""
    stats = jnp.promote_types(queries.dtype, jnp.float32)
    places = jnp.arange(block, dtype=jnp.int32)
    query, key = b * block + places, (j * block + places)[:, None]
    leave, of_keys = (_places(each, j, block)[:, None] for each in (visibility.leave, visibility.positions))
    visible = (key <= query) & (query < leave) & (_places(visibility.positions, b, block) - of_keys < window)
    # Computed once for all heads.
    mask = lax.optimization_barrier(jnp.where(visible, 0.0, -jnp.inf).astype(stats))
    scores = jnp.einsum("nkd,ngqd->nkgq", keys, queries, preferred_element_type=stats)
    return scores * keys.shape[-1] ** -0.5 + mask[:, None]


def _by_heads(x: Array) -> Array:
    """Return ``[T, N, ..., d]`` as ``[N, ..., T, d]``."""
    return jnp.moveaxis(x, 0, -2)


def _places(x: Array, index: Array, block: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * block, block, x.ndim - 1)


def _rows(x: Array, index: Array, block: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * block, block, x.ndim - 2)


def _add_rows(x: Array, rows: Array, index: Array) -> Array:
    start = index * rows.shape[1]
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, start, rows.shape[1], 1) + rows, start, 1)
