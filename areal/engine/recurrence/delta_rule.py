"""Gated delta rule over packed sequences, with a decay for each head or for each channel of its keys.

A head keeps a state ``S`` ``[Dk, Dv]``. With decay ``exp(g)``, key ``k``, value ``v`` and rate ``beta``, a token changes it to
``S' = exp(g) S + k (beta (v - k exp(g) S))``, and reads ``q S'`` (Yang et al., 2024, arXiv:2412.06464). Chunks are computed at once by
the inverse of a triangular matrix (the UT transform of the same paper). Kimi's variant has one decay for each channel of the keys
(Kimi Team, 2025, arXiv:2510.26692).
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.engine.recurrence.chunks import RunChunks

_EPSILON = 1e-6
"""Summand below the root of a norm, as in transformers."""


def gated_delta_rule(
    chunks: RunChunks, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, normalize: bool
) -> Tensor:
    """Return what the queries of a stream read.

    Args:
        chunks: runs of the stream.
        q, k: ``[T, Hk, Dk]``. Each of their heads serves the same number of consecutive heads of the values.
        v: ``[T, H, Dv]``.
        g: ``[T, H]`` or ``[T, H, Dk]``. Logarithm of the decay, at most 0.
        beta: ``[T, H]``.
        normalize: divide queries and keys by their norms.

    Returns:
        ``[T, H, Dv]``, in the dtype of ``q``.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    repeats = v.shape[1] // k.shape[1]
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    # Chunks of heads, [C, H, Q, D]. Places without a token have decay 1, key 0 and rate 0, and change no state.
    q, k, v, g, beta = (chunks.cut(x.to(wide)).transpose(1, 2) for x in (q, k, v, g, beta))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = (g if g.ndim == 4 else g.unsqueeze(-1)).cumsum(2)  # [C, H, Q, Dk | 1]
    kept = (decay[:, :, -1:] - decay).exp()

    # Inside of a chunk: what a token writes without the state before the chunk (u), and how it reads that state (w).
    rates, reads = beta.unsqueeze(-1) * k, decay.exp()
    writes = _decayed_products(rates, k, decay)
    ones = torch.eye(q.shape[2], dtype=wide, device=q.device)
    right = torch.cat([beta.unsqueeze(-1) * v, rates * reads], -1)
    u, w = torch.linalg.solve_triangular(writes.tril(-1) + ones, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    keys = (k * kept).transpose(-1, -2)
    of_chunk = reads[:, :, -1].unsqueeze(-1)  # [C, H, Dk | 1, 1]

    def step(some: slice, state: Tensor) -> Tensor:
        return of_chunk[some] * state + keys[some] @ (u[some] - w[some] @ state)

    states = chunks.scan(step, v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]))
    out = (q * reads) @ states + _decayed_products(q, k, decay) @ (u - w @ states)
    return chunks.join(out.transpose(1, 2)).to(dtype)


def _decayed_products(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Return ``[C, H, Q, Q]``: products of each row of ``x`` with earlier keys and its own, decayed by what lies between.

    Args:
        x, k: ``[C, H, Q, Dk]``.
        decay: ``[C, H, Q, Dk | 1]``. Logarithms, summed from the beginning of the chunk.
    """
    size = x.shape[2]
    # Above the diagonal, the exponential would overflow.
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    if decay.shape[-1] == 1:
        between = (decay - decay.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
        return (x @ k.transpose(-1, -2)) * between
    between = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(later.unsqueeze(-1), -torch.inf).exp()
    return torch.einsum("chid,chjd,chijd->chij", x, k, between)
