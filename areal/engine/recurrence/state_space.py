"""State-space layers over packed sequences: the scans of Mamba-1 and Mamba-2.

A channel keeps a state ``h`` ``[N]``. With step ``dt`` and input ``x``, a token changes it to ``h' = exp(A dt) h + B dt x``, and reads
``C h' + D x``. In Mamba-2, all channels of a head have the same ``A`` and ``dt``, so that chunks are products of matrices
(Dao and Gu, 2024, arXiv:2405.21060); in Mamba-1 (Gu and Dao, 2023, arXiv:2312.00752), tokens of equal depth are computed at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.recurrence.chunks import RunChunks


def state_space_scan(
    chunks: RunChunks, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None
) -> Tensor:
    """Return the outputs of the heads of Mamba-2, float32 or wider.

    Args:
        chunks: runs of the stream.
        x: ``[T, H, P]``.
        dt: ``[T, H]``, positive.
        a: ``[H]``, negative.
        b, c: ``[T, G, N]``. Each group serves the same number of consecutive heads.
        d: ``[H]``. Factor of the input in the output.

    Returns:
        ``[T, H, P]``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, b, c = (each.to(wide) for each in (x, dt, b, c))
    repeats = x.shape[1] // b.shape[1]
    if repeats > 1:
        b, c = b.repeat_interleave(repeats, 1), c.repeat_interleave(repeats, 1)
    # Chunks of heads, [C, H, Q, ...]. Places without a token have decay 1 and input 0.
    inputs, steps, b, c = (chunks.cut(each).transpose(1, 2) for each in (x * dt.unsqueeze(-1), dt, b, c))
    decay = (steps * a.to(wide)[:, None]).cumsum(-1)
    later = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=x.device).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    # States [H, N, P]: of each chunk alone, and before it.
    own = (b * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2) @ inputs
    of_chunk = decay[..., -1].exp()[..., None, None]
    states = chunks.scan(lambda some, state: of_chunk[some] * state + own[some], torch.zeros_like(own[0]))
    out = ((c @ b.transpose(-1, -2)) * between) @ inputs + (c * decay.exp().unsqueeze(-1)) @ states
    out = chunks.join(out.transpose(1, 2))
    return out if d is None else out + d.to(wide).unsqueeze(-1) * x


def selective_scan(
    chunks: RunChunks, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None
) -> Tensor:
    """Return the outputs of the channels of Mamba-1.

    Args:
        chunks: runs of the stream, in chunks of one token.
        x, dt: ``[T, I]``.
        a: ``[I, N]``, negative.
        b, c: ``[T, N]``.
        d: ``[I]``. Factor of the input in the output.

    Returns:
        ``[T, I]``, in the dtype of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    steps, inputs = chunks.cut(dt.to(wide))[:, 0], chunks.cut((dt * x).to(wide))[:, 0]
    b, c = chunks.cut(b.to(wide))[:, 0], chunks.cut(c.to(wide))[:, 0]
    decay = (steps.unsqueeze(-1) * a.to(wide)).exp()
    own = inputs.unsqueeze(-1) * b.unsqueeze(1)  # [C, I, N]
    states = chunks.scan(lambda some, state: decay[some] * state + own[some], torch.zeros_like(own[0]))
    out = ((decay * states + own) @ c.unsqueeze(-1)).squeeze(-1)
    out = chunks.join(out.unsqueeze(1)).to(x.dtype)
    return out if d is None else out + x * d


def positive_steps(
    dt: Tensor, bias: Tensor | None, *, softplus: bool, limits: tuple[float, float] | None = None
) -> Tensor:
    """Return the steps of tokens from the output of their projection, with the channels (heads) in the last dimension."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt if limits is None else dt.clamp(*limits)
