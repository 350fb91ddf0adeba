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

BLOCK = 128
"""Queries, and keys, that are computed together."""


class Visibility(NamedTuple):
    """Which tokens of a stream see which; all int32.

    Attributes:
        leave: ``[T]``. Place after the last token that sees this one.
        positions: ``[T]``. Positions of the tokens in their sequences.
        first: ``[T / block]``. For each block of queries, the first block with a key that one of them sees. A block has
            :data:`BLOCK` tokens, or all queries of a device if those are fewer.
    """

    leave: Array
    positions: Array
    first: Array


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
    block = min(tokens, BLOCK)
    before = first_query // block
    stats = jnp.promote_types(q.dtype, jnp.float32)

    def of_block(own: Array) -> tuple[Array, Array]:
        queries, b = _rows(q, own, block), before + own

        def add_keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            scores = _scores(queries, _rows(k, j, block), visibility, b, j, window, block)
            # Of a row without a visible key so far, all weights are zero.
            new_top = jnp.maximum(top, scores.max(-1))
            base = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights, kept = jnp.exp(scores - base[..., None]), jnp.exp(top - base)
            product = jnp.einsum(
                "ngqk,knd->ngqd", weights.astype(v.dtype), _rows(v, j, block), preferred_element_type=stats
            )
            return new_top, total * kept + weights.sum(-1), out * kept[..., None] + product

        shape = (n, g, block)
        start = (jnp.full(shape, -jnp.inf, stats), jnp.zeros(shape, stats), jnp.zeros((*shape, d), stats))
        top, total, out = lax.fori_loop(visibility.first[b], b + 1, add_keys, start)
        return (out / total[..., None]).transpose(2, 0, 1, 3).astype(q.dtype), top + jnp.log(total)

    out, lse = lax.map(of_block, jnp.arange(tokens // block, dtype=jnp.int32))
    out = out.reshape(q.shape)
    return out, _Saved(q, k, v, visibility, window, first_query, out, lse)


def _backward(saved: _Saved, grad: Array) -> tuple[Array, Array, Array, None, None, None]:
    q, k, v, visibility, window, first_query, out, all_lse = saved
    tokens, _, _, d = q.shape
    block = min(tokens, BLOCK)
    before, stats = first_query // block, all_lse.dtype
    # The gradient of a softmax subtracts the mean of the gradients of its weights, which is this product.
    means = (grad.astype(stats) * out.astype(stats)).sum(-1)

    def of_block(carry: tuple[Array, Array], own: Array) -> tuple[tuple[Array, Array], Array]:
        queries, grads, lse = _rows(q, own, block), _rows(grad, own, block), all_lse[own]
        mean, b = _rows(means, own, block).transpose(1, 2, 0), before + own

        def add_keys(j: Array, inner: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            grad_q, grad_k, grad_v = inner
            keys, values = _rows(k, j, block), _rows(v, j, block)
            weights = jnp.exp(_scores(queries, keys, visibility, b, j, window, block) - lse[..., None])
            of_weights = jnp.einsum("qngd,knd->ngqk", grads, values, preferred_element_type=stats)
            of_scores = (weights * (of_weights - mean[..., None]) * d**-0.5).astype(q.dtype)
            grad_q += jnp.einsum("ngqk,knd->qngd", of_scores, keys, preferred_element_type=stats)
            of_keys = jnp.einsum("ngqk,qngd->knd", of_scores, queries, preferred_element_type=stats)
            of_values = jnp.einsum("ngqk,qngd->knd", weights.astype(q.dtype), grads, preferred_element_type=stats)
            return grad_q, _add_rows(grad_k, of_keys, j), _add_rows(grad_v, of_values, j)

        start = (jnp.zeros(queries.shape, stats), *carry)
        grad_q, grad_k, grad_v = lax.fori_loop(visibility.first[b], b + 1, add_keys, start)
        return (grad_k, grad_v), grad_q.astype(q.dtype)

    zeros = (jnp.zeros(k.shape, stats), jnp.zeros(v.shape, stats))
    (grad_k, grad_v), grad_q = lax.scan(of_block, zeros, jnp.arange(tokens // block, dtype=jnp.int32))
    return grad_q.reshape(q.shape), grad_k.astype(k.dtype), grad_v.astype(v.dtype), None, None, None


attention.defvjp(_forward, _backward)


def _scores(
    queries: Array, keys: Array, visibility: Visibility, b: Array, j: Array, window: Array, block: int
) -> Array:
    """Return the scores ``[N, G, block, block]`` of two blocks, ``-inf`` where a key is not visible."""
    stats = jnp.promote_types(queries.dtype, jnp.float32)
    places = jnp.arange(block, dtype=jnp.int32)
    query, key = (b * block + places)[:, None], j * block + places
    distance = _rows(visibility.positions, b, block)[:, None] - _rows(visibility.positions, j, block)
    visible = (key <= query) & (query < _rows(visibility.leave, j, block)) & (distance < window)
    scores = jnp.einsum("qngd,knd->ngqk", queries, keys, preferred_element_type=stats)
    return jnp.where(visible, scores * keys.shape[-1] ** -0.5, -jnp.inf)


def _rows(x: Array, index: Array, block: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * block, block)


def _add_rows(x: Array, rows: Array, index: Array) -> Array:
    start = index * len(rows)
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, start, len(rows)) + rows, start, 0)
