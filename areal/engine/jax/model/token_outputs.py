"""Per-token outputs from hidden states: log-probs, entropy, top-k, logits, values and the hidden states themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from areal.api.batch import IGNORE_INDEX
from areal.engine.jax.lora.contribution import add_adapters
from areal.engine.jax.model.architecture import HEAD, NORM
from areal.engine.jax.model.decoder import Stream, decode, norm
from areal.engine.jax.model.products import Product, WeightUse, gathered_linear, linear, shifted
from areal.engine.jax.model.spec import ModelSpec, Params
from areal.engine.model.classifier import VALUE_BIAS, VALUE_WEIGHT
from areal.utils.data.sequences import ROUTED_EXPERTS

_CHUNK = 512
"""Most rows whose logits are computed at a time."""

_HEAD = HEAD.removesuffix(".weight")
_LOG_SUM_EXP = "log-sum-exp"
"""Name of the log-sum-exp of logits, which is kept for the backward."""


class Rows(NamedTuple):
    """The tokens with outputs; a token may have several rows, with different targets.

    Attributes:
        places: int32 ``[D, R]``. Place of each row in the stream.
        targets: int32 ``[D, R]`` or ``[D, R, K]``.
        temperature: ``[D, R]``, in the dtype of the outputs.
    """

    places: Array
    targets: Array
    temperature: Array


@dataclass(frozen=True)
class Wanted:
    """The outputs to compute: names of :class:`~areal.api.batch.TokenOutputs`, and ``k`` of ``topk`` (0 without). Hashable."""

    names: frozenset[str]
    topk: int


Outputs = dict[str, Array]

_Chunk = tuple[Array, Array, Array, Array | None]
"""Hidden states, targets, temperatures and slots of some rows."""


def compute_outputs(spec: ModelSpec, wanted: Wanted, params: Params, stream: Stream, rows: Rows) -> Outputs:
    """Run the model. Returns the outputs by name, each ``[D, R, ...]``; of top-k, ``topk`` are log-probs and ``topk_ids`` tokens."""
    hidden, experts = decode(spec, params, stream, record=ROUTED_EXPERTS in wanted.names)
    hidden = spec.spread(jnp.take_along_axis(hidden, rows.places[..., None], 1), "cp")
    hidden = norm(spec, hidden, NORM, params[NORM])
    slots = None if stream.slots is None else jnp.take_along_axis(stream.slots, rows.places, 1)
    out: Outputs = {}
    if experts is not None:
        out[ROUTED_EXPERTS] = jnp.take_along_axis(experts, rows.places[..., None, None], 1)
    if "hidden" in wanted.names:
        out["hidden"] = hidden
    if "values" in wanted.names:
        out["values"] = _values(spec, params, hidden)
    if "logits" in wanted.names:
        weight, use = _head(spec, params)
        out["logits"] = _logits(spec, params, linear(hidden, weight, use), hidden, rows.temperature, slots)
    if wanted.topk or wanted.names & {"logprobs", "entropy"}:
        out |= _of_head(spec, wanted, params, hidden, rows, slots)
    return {name: spec.spread(value) for name, value in out.items()}


def _values(spec: ModelSpec, params: Params, hidden: Array) -> Array:
    """Return the outputs of the value head."""
    weight = params[VALUE_WEIGHT]
    values = linear(hidden, weight, spec.use(VALUE_WEIGHT, weight.shape))
    if VALUE_BIAS in params:
        bias = params[VALUE_BIAS]
        values = shifted(values, bias, spec.use(VALUE_BIAS, bias.shape))
    return values[..., 0].astype(spec.numbers.stats)


def _head(spec: ModelSpec, params: Params) -> tuple[Array, WeightUse]:
    """Return the head's weight and its use. Logits are not rounded."""
    weight, stats = params[spec.arch.head], spec.numbers.stats
    return weight, spec.use(spec.arch.head, weight.shape, stats if spec.fp32_head else None, stats)


def _logits(
    spec: ModelSpec, params: Params, products: Array, hidden: Array, temperature: Array, slots: Array | None
) -> Array:
    """Return the logits after temperature, in the dtype of the outputs, from the products with the head's weight."""
    stats = spec.numbers.stats
    # With tied embeddings, too, an adapter of the head is not one of the embedding.
    factors = spec.use_of_factors(stats if spec.fp32_head else None, stats)
    return add_adapters(products, hidden, params, _HEAD, slots, factors) / temperature[..., None]


def _of_head(
    spec: ModelSpec, wanted: Wanted, params: Params, hidden: Array, rows: Rows, slots: Array | None
) -> Outputs:
    """Compute the outputs that need the head, in chunks of rows. The backward computes their logits again, unless they may be kept."""
    weight, use = _head(spec, params)

    parts, rows_of_part = spec.mesh.shape["cp"], hidden.shape[1] // spec.mesh.shape["cp"]
    size = math.gcd(rows_of_part, _CHUNK)
    products = None
    if hidden.shape[1] * len(weight) * jnp.dtype(spec.numbers.stats).itemsize <= spec.keep_bytes:
        # One product for all chunks, outside of their loop, which would copy the results of each into an array of zeros.
        products = lax.stop_gradient(linear(hidden, weight, use))
        products = products.reshape(len(products), parts, -1, size, len(weight))

    def of_chunk(product: Product, products: Array | None, chunk: tuple[Array, _Chunk]) -> Outputs:
        index, (states, targets, temperature, slots) = chunk
        known = None
        if products is not None:
            known = lax.dynamic_index_in_dim(products, index, 2, keepdims=False).reshape(*states.shape[:2], -1)
        logits = _logits(spec, params, product(states, known), states, temperature, slots)
        return _statistics(logits, targets, wanted)

    keep = jax.checkpoint_policies.save_only_these_names(_LOG_SUM_EXP)

    def loop(weight: Array, products: Array | None, arrays: _Chunk) -> Outputs:
        of = functools.partial(of_chunk, gathered_linear(weight, use), products)
        # In a loop nothing can be computed once for both passes; a barrier against it would keep unused arrays.
        return _by_chunks(jax.checkpoint(of, prevent_cse=False, policy=keep), arrays, parts, size)

    # The backward gathers the weight again: a gathered weight is not kept.
    return jax.checkpoint(loop, policy=keep)(weight, products, (hidden, rows.targets, rows.temperature, slots))


def _by_chunks(of: Callable[[tuple[Array, _Chunk]], Outputs], arrays: _Chunk, parts: int, size: int) -> Outputs:
    """Apply a function to chunks of ``[D, R, ...]`` arrays, one after the other, and to their indices.

    Args:
        of: the function.
        arrays: of all rows.
        parts: of ``R`` over ``cp``. Each chunk has rows of every part.
        size: rows of a part in a chunk.
    """

    def split(x: Array) -> Array:
        chunks = jnp.moveaxis(x.reshape(len(x), parts, -1, size, *x.shape[2:]), 2, 0)
        return chunks.reshape(*chunks.shape[:2], parts * size, *x.shape[2:])

    def join(x: Array) -> Array:
        rows = jnp.moveaxis(x.reshape(*x.shape[:2], parts, size, *x.shape[3:]), 0, 2)
        return rows.reshape(len(rows), -1, *x.shape[3:])

    chunks = jax.tree.map(split, arrays)
    return jax.tree.map(join, lax.map(of, (jnp.arange(len(chunks[0]), dtype=jnp.int32), chunks)))


def _statistics(logits: Array, targets: Array, wanted: Wanted) -> Outputs:
    """Return log-probs, entropy and top-k of logits ``[D, R, V]``."""
    out: Outputs = {}
    lse = _log_sum_exp(logits)
    if "logprobs" in wanted.names:
        columns = targets if targets.ndim == 3 else targets[..., None]
        known = (columns >= 0) & (columns < logits.shape[-1])
        picked = jnp.take_along_axis(logits, jnp.where(known, columns, 0), -1) - lse[..., None]
        # A target outside of the vocabulary cannot be refused here, without waiting for the device.
        picked = jnp.where(known, picked, jnp.where(columns == IGNORE_INDEX, 0.0, jnp.nan))
        out["logprobs"] = picked.reshape(targets.shape)
    if "entropy" in wanted.names:
        out["entropy"] = lse - (jnp.exp(logits - lse[..., None]) * logits).sum(-1)
    if wanted.topk:
        best, out["topk_ids"] = lax.top_k(logits, wanted.topk)
        out["topk"] = best - lse[..., None]
    return out


@jax.custom_vjp
def _log_sum_exp(x: Array) -> Array:
    """Return the logarithm of the sum of exponentials over the last dimension. The backward keeps it, and makes one pass over ``x``."""
    return _log_sum_exp_forward(x)[0]


def _log_sum_exp_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    lse = checkpoint_name(jax.nn.logsumexp(x, -1), _LOG_SUM_EXP)
    return lse, (x, lse)


def _log_sum_exp_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array]:
    x, lse = saved
    return (jnp.exp(x - lse[..., None]) * grad[..., None],)


_log_sum_exp.defvjp(_log_sum_exp_forward, _log_sum_exp_backward)
