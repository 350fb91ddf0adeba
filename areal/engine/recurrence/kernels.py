"""Operations of recurrent layers by installed kernels: flash-linear-attention, causal-conv1d and mamba-ssm, on CUDA and in 16 bits.

The functions have the signatures and meanings of those of this package, and fall back to them for what a kernel does not compute: other
dtypes, shared prefixes, and sizes that it refuses.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.engine.recurrence.chunks import RunChunks
from areal.engine.recurrence.convolution import causal_convolution
from areal.engine.recurrence.delta_rule import gated_delta_rule
from areal.engine.recurrence.state_space import state_space_scan

logger = logging.getLogger(__name__)

PACKAGES = ("fla.ops.gated_delta_rule", "fla.ops.kda", "causal_conv1d", "mamba_ssm.ops.triton.ssd_combined")
"""Modules with kernels."""
_GATED, _KIMI, _CONVOLUTION, _SCAN = PACKAGES

_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of activations that all kernels take. They sum in float32."""

_SSD_CHUNK = 256
"""Tokens of a chunk of Mamba-2's kernel: the default of mamba-ssm."""


@dataclass(frozen=True)
class Operations:
    """The operations of recurrent layers; each with the arguments of the function that is its default."""

    delta_rule: Callable[..., Tensor] = gated_delta_rule
    convolution: Callable[..., Tensor] = causal_convolution
    scan: Callable[..., Tensor] = state_space_scan


@functools.cache
def operations_on(device: torch.device) -> Operations:
    """Return the operations for a device. Chosen at the first call, and logged."""
    if device.type != "cuda":
        return Operations()
    found: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.import_module(name)
        except ImportError as error:
            logger.info("recurrent layers without the kernels of %s: %s", name, error)
    logger.info("recurrent layers on %s: kernels of %s", device, ", ".join(found) or "torch alone")
    return kernel_operations(found)


def kernel_operations(packages: Mapping[str, Any]) -> Operations:
    """Return the operations by the kernels of some modules, and by torch for the rest.

    Args:
        packages: modules by their names in :data:`PACKAGES`.
    """
    chosen: dict[str, Callable[..., Tensor]] = {}
    if _GATED in packages or _KIMI in packages:
        chosen["delta_rule"] = functools.partial(_delta_rule, packages)
    if _CONVOLUTION in packages:
        chosen["convolution"] = functools.partial(_convolution, packages[_CONVOLUTION].causal_conv1d_fn)
    if _SCAN in packages:
        chosen["scan"] = functools.partial(_scan, packages[_SCAN].mamba_chunk_scan_combined)
    return Operations(**chosen)


def _delta_rule(
    packages: Mapping[str, Any],
    chunks: RunChunks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    normalize: bool,
) -> Tensor:
    module = packages.get(_KIMI if g.ndim == 3 else _GATED)
    if module is None or chunks.cu_seqlens is None or v.dtype not in _DTYPES:
        return gated_delta_rule(chunks, q, k, v, g, beta, normalize=normalize)
    kernel = module.chunk_kda if g.ndim == 3 else module.chunk_gated_delta_rule
    wide = g.to(torch.promote_types(g.dtype, torch.float32))
    repeats = v.shape[1] // k.shape[1]
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    q, k, v, g, beta = (x.contiguous()[None] for x in (q.to(v.dtype), k.to(v.dtype), v, wide, beta))
    out: Tensor = kernel(q, k, v, g, beta, cu_seqlens=chunks.cu_seqlens, use_qk_l2norm_in_kernel=normalize)[0]
    return out[0]


def _convolution(
    kernel: Callable[..., Tensor],
    chunks: RunChunks,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    channels, taps = weight.shape
    supported = activation in (None, "silu", "swish") and 2 <= taps <= 4 and channels % 8 == 0
    # The kernel recognizes adjacent channels by the stride between tokens, which is not defined for one token.
    if not supported or chunks.seq_idx is None or weight.dtype not in _DTYPES or x.shape[-1] == 1:
        return causal_convolution(chunks, x, weight, bias, activation)
    # The kernel takes borders of sequences with channels that lie next to each other in memory.
    x = x.to(weight.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return kernel(x, weight.contiguous(), bias, seq_idx=chunks.seq_idx, activation=activation)


def _scan(
    kernel: Callable[..., Tensor],
    chunks: RunChunks,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
) -> Tensor:
    if chunks.seq_idx is None or x.dtype not in _DTYPES:
        return state_space_scan(chunks, x, dt, a, b, c, d)
    x, dt, b, c = (each.contiguous()[None] for each in (x, dt, b, c))
    return kernel(x, dt, a, b, c, _SSD_CHUNK, D=d, seq_idx=chunks.seq_idx)[0]
