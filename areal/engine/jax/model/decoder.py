"""The forward of a decoder: pure functions over arrays.

``D`` streams of ``T`` tokens, one for each data-parallel rank. The layers run by a scan over the rows of their arrays, so that
compiling takes as long for thirty layers as for two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from areal.engine.jax.lora.contribution import add_adapters
from areal.engine.jax.mesh import STREAMS
from areal.engine.jax.model.architecture import EMBEDDING, LAYER, Architecture, layer_arrays
from areal.engine.jax.model.attention import ATTENTION, BLOCK, Visibility, attention
from areal.engine.jax.model.experts import routed_feed_forward
from areal.engine.jax.model.fused_attention import kernel_attention
from areal.engine.jax.model.products import linear, lookup, scaled, shifted
from areal.engine.jax.model.spec import ModelSpec, Params

_PROJECTION = "projection"
"""Name of the results of linear layers, which may be kept for the backward."""


class Stream(NamedTuple):
    """The tokens of ``D`` streams.

    Attributes:
        ids: int32 ``[D, T]``.
        visibility: which tokens see which.
        slots: int32 ``[D, T]``. Slot of each token's adapter; ``None`` if all tokens have the same adapter, or none.
        experts: int32 ``[D, T, L, K]``. Experts that tokens are sent to in each layer, or -1 where the router decides; ``None`` if it
            decides for all.
    """

    ids: Array
    visibility: Visibility
    slots: Array | None = None
    experts: Array | None = None


class _LayerRow(NamedTuple):
    """What differs between layers: weights, the window of attention, and recorded experts ``[D, T, K]``."""

    weights: Mapping[str, Array]
    window: Array
    experts: Array | None


def decode(spec: ModelSpec, params: Params, stream: Stream, *, record: bool = False) -> tuple[Array, Array | None]:
    """Return the last hidden states ``[D, T, H]``, before the last norm, and with ``record`` the experts of all tokens, ``[D, T, L, K]``."""
    arch, dtype = spec.arch, jnp.dtype(spec.numbers.compute)
    embedding = params[EMBEDDING]
    hidden = lookup(stream.ids, embedding, arch.pad_token_id, spec.use(EMBEDDING, embedding.shape))
    rotate = _rotation(arch, stream.visibility.positions, dtype)

    def layer(hidden: Array, row: _LayerRow) -> tuple[Array, Array | None]:
        hidden, chosen = _layer(spec, row, hidden, stream, rotate)
        return hidden, chosen if record else None

    body: Any = layer
    if spec.recompute:
        body = jax.checkpoint(layer)
    elif spec.arch.experts is None and spec.on_cpu:
        # Elementwise functions are computed again: on a CPU, new memory for their results takes longer.
        keep = jax.checkpoint_policies.save_only_these_names(_PROJECTION, ATTENTION)
        body = jax.checkpoint(layer, prevent_cse=False, policy=keep)
    experts = None if stream.experts is None else jnp.moveaxis(stream.experts, 2, 0)
    rows = _LayerRow(layer_arrays(params), jnp.asarray(arch.windows, jnp.int32), experts)
    hidden, chosen = lax.scan(body, spec.spread(hidden, "cp"), rows)
    return hidden, None if chosen is None else jnp.moveaxis(chosen, 0, 2)


def norm(spec: ModelSpec, x: Array, name: str, weight: Array) -> Array:
    """Normalize by the root mean square (Zhang and Sennrich, 2019), and multiply by a weight."""
    wide = x.astype(spec.numbers.stats)
    scale = lax.rsqrt(jnp.square(wide).mean(-1) + spec.arch.eps)
    # As a product, whose backward is one, too: XLA reduces a product of two arrays on a CPU at a tenth of the rate.
    wide = jnp.einsum("...h,...->...h", wide, scale)
    return scaled(wide.astype(x.dtype), weight, spec.use(name, weight.shape))


def _layer(
    spec: ModelSpec, row: _LayerRow, hidden: Array, stream: Stream, rotate: Callable[[Array], Array]
) -> tuple[Array, Array | None]:
    """Compute one layer: attention and feed-forward network, each on normalized states, each added to its input.

    Returns:
        The states, and the experts that tokens were sent to, ``[D, T, K]``, or ``None`` for a dense layer.
    """
    weights = row.weights
    project = functools.partial(_project, spec, weights, stream.slots)
    normed = functools.partial(_normed, spec, weights)
    heads, groups = spec.arch.n_kv_heads, spec.arch.n_heads // spec.arch.n_kv_heads
    shape = (*hidden.shape[:2], -1, spec.arch.head_dim)

    x = normed("input_layernorm", hidden)
    q, k, v = (project(f"self_attn.{name}_proj", x).reshape(shape) for name in "qkv")
    q, k = (rotate(normed(f"self_attn.{name}_norm", each)) for name, each in (("q", q), ("k", k)))
    q = q.reshape(*q.shape[:2], heads, groups, -1)
    out = _attend(spec, q, k, v, stream.visibility, row.window)
    hidden = spec.spread(hidden + project("self_attn.o_proj", out.reshape(*out.shape[:2], -1)), "cp")

    x = normed("post_attention_layernorm", hidden)
    if spec.arch.experts is not None:
        out, chosen = routed_feed_forward(spec, spec.arch.experts, weights, x, row.experts)
        return spec.spread(hidden + out, "cp"), chosen
    x = jax.nn.silu(project("mlp.gate_proj", x)) * project("mlp.up_proj", x)
    return spec.spread(hidden + project("mlp.down_proj", x), "cp"), None


def _project(spec: ModelSpec, weights: Mapping[str, Array], slots: Array | None, name: str, x: Array) -> Array:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    y = linear(x, weight, spec.use(f"{LAYER}{name}.weight", weight.shape))
    y = add_adapters(y, x, weights, name, slots, spec.use_of_factors())
    y = y if bias is None else shifted(y, bias, spec.use(f"{LAYER}{name}.bias", bias.shape))
    return checkpoint_name(y, _PROJECTION)


def _normed(spec: ModelSpec, weights: Mapping[str, Array], name: str, x: Array) -> Array:
    """Normalize, if the layer has a norm of this name."""
    weight = weights.get(f"{name}.weight")
    return x if weight is None else norm(spec, x, f"{LAYER}{name}.weight", weight)


def _attend(spec: ModelSpec, q: Array, k: Array, v: Array, visibility: Visibility, window: Array) -> Array:
    """Run attention on each device for its queries and, if they divide, its share of the heads. Keys are gathered over ``cp``."""

    def of_device(q: Array, k: Array, v: Array, visibility: Visibility, window: Array) -> Array:
        own = jax.tree.map(lambda x: x[0], visibility)
        if spec.kernel is not None and q.shape[1] % BLOCK == 0:
            return kernel_attention(spec.kernel, q[0], k[0], v[0], own)[None]
        first_query = lax.axis_index("cp") * q.shape[1]
        return attention(q[0], k[0], v[0], own, window, first_query)[None]

    axis = "tp" if k.shape[2] % spec.mesh.shape["tp"] == 0 else None
    queries, keys = PartitionSpec(STREAMS, "cp", axis), PartitionSpec(STREAMS, None, axis)
    in_specs = (queries, keys, keys, PartitionSpec(STREAMS), PartitionSpec())
    # The trips of its loops differ between devices, which is not an error: nothing in it is a collective.
    run = jax.shard_map(of_device, mesh=spec.mesh, in_specs=in_specs, out_specs=queries, check_vma=False)
    return run(q, k, v, visibility, window)


def _rotation(arch: Architecture, positions: Array, dtype: Any) -> Callable[[Array], Array]:
    """Return the function that rotates heads ``[D, T, n, d]`` by their positions (Su et al., 2021)."""
    angles = positions[..., None] * jnp.asarray(arch.inv_freq, jnp.promote_types(dtype, jnp.float32))
    angles = jnp.concatenate([angles, angles], -1)[:, :, None]
    cos, sin = (f(angles) * arch.rope_scale for f in (jnp.cos, jnp.sin))
    cos, sin = cos.astype(dtype), sin.astype(dtype)

    def rotate(x: Array) -> Array:
        first, second = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-second, first], -1) * sin

    return rotate
