"""Attention kernels of JAX for TPUs and GPUs, in place of :func:`~areal.engine.jax.model.attention.attention`.

They compute packed sequences in 16 bits, if all layers have the same window. Everything else runs in blocks on every platform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu import attention as gpu
from jax.experimental.pallas.ops.tpu import splash_attention as tpu
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from areal.engine.jax.model.architecture import UNLIMITED, Architecture
from areal.engine.jax.model.attention import BLOCK, Visibility
from areal.engine.jax.model.products import Numbers

GPUS = ("gpu", "cuda", "rocm")
"""Platforms of GPUs, as JAX names them."""

_LARGEST_BLOCK = 512
"""Queries, and keys, that the kernel of a TPU computes together at most."""


@dataclass(frozen=True)
class Kernel:
    """An attention kernel. Hashable: programs are compiled once for each.

    Attributes:
        name: ``splash`` for TPUs, ``triton`` for GPUs.
        window: a token sees at most so many tokens, itself included; ``None`` without a limit.
        interpret: run the kernel on a CPU, as in the tests.
    """

    name: Literal["splash", "triton"]
    window: int | None = None
    interpret: bool = False


def kernel_for(platform: str, arch: Architecture, numbers: Numbers, cp: int) -> Kernel | None:
    """Return the kernel for a model, or ``None`` for one that is computed in blocks.

    Args:
        platform: of the devices, as JAX names it.
        arch: the decoder.
        numbers: dtypes of the model.
        cp: ranks over which the tokens of a stream are divided.
    """
    narrow = numbers.compute in ("bfloat16", "float16") and not numbers.wide
    if not narrow or cp > 1 or len(set(arch.windows)) > 1:
        return None
    window = None if arch.windows[0] == UNLIMITED else arch.windows[0]
    if platform == "tpu":
        return Kernel("splash", window)
    return Kernel("triton") if platform in GPUS and window is None else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel_attention(kernel: Kernel, q: Array, k: Array, v: Array, visibility: Visibility) -> Array:
    """Return the attention of all tokens of one stream of packed sequences, in whole blocks.

    Args:
        kernel: computes it.
        q: ``[T, N, G, d]``. Queries of ``G`` heads for each of ``N`` key heads.
        k, v: ``[T, N, d]``.
        visibility: of sequences without shared prefixes.

    Returns:
        ``[T, N, G, d]``, in the dtype of ``q``.
    """
    with jax.default_matmul_precision("default"):
        return _compute(kernel, visibility, q, k, v)


def _forward(
    kernel: Kernel, q: Array, k: Array, v: Array, visibility: Visibility
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    with jax.default_matmul_precision("default"):
        return jax.vjp(functools.partial(_compute, kernel, visibility), q, k, v)


def _backward(
    kernel: Kernel, pull: Callable[[Array], tuple[Array, Array, Array]], grad: Array
) -> tuple[Array | None, ...]:
    # Products of 16 bits are summed in float32. Kernels refuse the precision that the rest of the model asks for.
    with jax.default_matmul_precision("default"):
        return *pull(grad), None


kernel_attention.defvjp(_forward, _backward)


def _compute(kernel: Kernel, visibility: Visibility, q: Array, k: Array, v: Array) -> Array:
    run = _splash if kernel.name == "splash" else _triton
    return run(kernel, visibility, q.reshape(len(q), -1, q.shape[-1]), k, v).reshape(q.shape)


def _triton(kernel: Kernel, visibility: Visibility, q: Array, k: Array, v: Array) -> Array:
    k, v = (jnp.repeat(each, q.shape[1] // k.shape[1], 1)[None] for each in (k, v))
    # The tokens of a sequence, and no others, have its end.
    ends = visibility.leave[None]
    return gpu.mha(q[None], k, v, ends, sm_scale=q.shape[-1] ** -0.5, causal=True, interpret=kernel.interpret)[0]


def _splash(kernel: Kernel, visibility: Visibility, q: Array, k: Array, v: Array) -> Array:
    shape = (len(q), len(q))
    block = next(size for size in (_LARGEST_BLOCK, _LARGEST_BLOCK // 2, BLOCK) if len(q) % size == 0)
    mask = tpu.CausalMask(shape) if kernel.window is None else tpu.LocalMask(shape, (kernel.window - 1, 0), 0)
    run = tpu.make_splash_mha(
        tpu.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=tpu.BlockSizes(*(block,) * 8),
        head_shards=1,
        q_seq_shards=1,
        interpret=kernel.interpret,
    )
    first = visibility.first[:: block // BLOCK] // (block // BLOCK)
    run.fwd_mask_info = _without_other_sequences(run.fwd_mask_info, first, by_queries=True)
    run.dq_mask_info = _without_other_sequences(run.dq_mask_info, first, by_queries=True)
    run.dkv_mask_info = _without_other_sequences(run.dkv_mask_info, first, by_queries=False)
    q, k, v = (each.swapaxes(0, 1) for each in (q * q.shape[-1] ** -0.5, k, v))
    return run(q, k, v, tpu.SegmentIds(visibility.leave, visibility.leave)).swapaxes(0, 1)


def _without_other_sequences(info: MaskInfo, first: Array, *, by_queries: bool) -> MaskInfo:
    """Leave out the blocks whose queries and keys are of different sequences, so that the cost follows the sequences.

    Args:
        info: blocks of a mask, ``[1, queries, keys]``.
        first: for each block of queries, the first block with keys of its sequences.
        by_queries: the step of a row computes the block of keys that ``data_next`` names; else that of a column one of queries.
    """
    if info.block_mask is None or info.data_next is None:
        return info
    other = jnp.asarray(info.data_next)
    if by_queries:
        begin = first[None, :, None]
        seen, other = other >= begin, jnp.maximum(other, begin.astype(other.dtype))
    else:
        seen = jnp.arange(other.shape[2]) >= first[other]
    return info._replace(block_mask=jnp.where(seen, info.block_mask, 0).astype(info.block_mask.dtype), data_next=other)
