"""Causal attention over packed sequences, ``[T, heads, dim]`` in and out; knows nothing of models and of ranks.

On a GPU in half precision: flash_attn where it is installed, torch's ``varlen_attn`` otherwise. Anywhere else: scaled
dot-product attention on one run of equal segments at a time, so that no ``T x T`` mask and no padding is ever made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
_FLASH_HEAD_DIM = 256
_BLOCK = 512
"""Queries in a block where a mask has to be written out, which bounds the mask to ``_BLOCK`` rows."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Where packed sequences start and end. Queries of a segment see keys of the same segment alone.

    Segments stand end to end. Queries and keys of a segment are aligned at their ends: with ``a``
    queries and ``b >= a`` keys, query ``i`` stands at key ``i + b - a``. Segments without queries are left out.

    Attributes:
        q_lens, k_lens: queries and keys of each segment, on the host.
        cu_q, cu_k: int32 ``[n + 1]``, where each segment starts, on the device.
        keys: int64 ``[sum(k_lens)]``, which rows of the keys and values given the segments see, on the device; ``None`` where these stand
            end to end as well.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor
    keys: Tensor | None = None
    _masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        q_lens: Sequence[int],
        k_lens: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        keys: Tensor | None = None,
    ) -> Segments:
        """Segments of these lengths; ``k_lens`` defaults to ``q_lens``. ``keys`` may be on any device.

        Raises:
            ValueError: a segment has no query, or fewer keys than queries.
        """
        k_lens = q_lens if k_lens is None else k_lens
        if len(q_lens) != len(k_lens) or any(not 0 < a <= b for a, b in zip(q_lens, k_lens, strict=False)):
            raise ValueError(
                f"q_lens = {tuple(q_lens)}, k_lens = {tuple(k_lens)}: "
                "each segment needs 1 <= queries <= keys; leave empty ones out"
            )
        cu_q = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32).to(device)
        cu_k = cu_q if k_lens is q_lens else torch.tensor([0, *accumulate(k_lens)], dtype=torch.int32).to(device)
        return cls(tuple(q_lens), tuple(k_lens), cu_q, cu_k, None if keys is None else keys.to(device))

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs of neighbours of equal size, as (segments, queries of each, keys of each)."""
        return [(len(list(run)), a, b) for (a, b), run in groupby(zip(self.q_lens, self.k_lens, strict=True))]

    def mask(self, n_queries: int, n_keys: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What to add to logits ``[n_queries, n_keys]``, aligned at their ends; ``None`` for a query alone, which sees all.

        Made once, for all layers: the backward of each keeps it.
        """
        if n_queries == 1:
            return None
        key = (n_queries, n_keys, window, dtype)
        if key not in self._masks:
            visible = _visible(n_queries, n_keys, window, self.cu_q.device)
            self._masks[key] = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
                ~visible, -torch.inf
            )
        return self._masks[key]


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each segment; exact, and differentiable in ``q``, ``k``, ``v`` and ``sinks``.

    Args:
        q, k, v: ``[Tq, Hq, D]``, ``[Tk, Hkv, D]`` and ``[Tk, Hkv, Dv]``, of one floating dtype. ``Hq`` is a multiple of
            ``Hkv``; query head ``h`` reads key head ``h // (Hq / Hkv)``.
        segments: lengths that sum to ``Tq`` and ``Tk``, on the device of ``q``; with ``segments.keys`` any ``Tk``.
        scale: multiplies ``q @ k``.
        window: key ``j`` is visible to query ``i`` where ``0 <= i - j < window``; ``None`` shows every earlier key.
        sinks: ``[Hq]``, a logit per head that joins the softmax's denominator and brings no value.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before masking and sinks.

    Returns:
        ``[Tq, Hq, Dv]``, in the dtype of ``q``.

    Raises:
        ValueError: shapes, dtypes or lengths that do not fit together.
    """
    _check(q, k, v, segments, window, sinks)
    if segments.keys is not None:
        k, v = (TakeRows.apply(x, segments.keys) for x in (k, v))
    if _runs_varlen(q, v, sinks, softcap):
        return _varlen(q, k, v, segments, scale, window, softcap)
    runs = segments.runs
    queries = q.split([n * a for n, a, _ in runs])
    keys = k.split([n * b for n, _, b in runs])
    values = v.split([n * b for n, _, b in runs])
    outs = []
    for (n, _, _), qs, ks, vs in zip(runs, queries, keys, values, strict=True):
        qs, ks, vs = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in (qs, ks, vs))
        if sinks is None and softcap is None:
            out = _fused(qs, ks, vs, segments, scale, window)
        else:
            out = _written_out(qs, ks, vs, scale, window, sinks, softcap)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


class TakeRows(torch.autograd.Function):
    """Some rows of a tensor, any of them several times; their gradients are summed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.like = index, (x.shape, x.dtype)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shape, dtype = ctx.like
        wide = torch.promote_types(dtype, torch.float32)
        total = grads[0].new_zeros(shape, dtype=wide)
        return total.index_add_(0, ctx.index, grads[0].to(wide)).to(dtype), None


def _check(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: int | None, sinks: Tensor | None) -> None:
    if q.dim() != 3 or k.shape[2] != q.shape[2] or v.shape[:2] != k.shape[:2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: "
            "expected [Tq, Hq, D], [Tk, Hkv, D] and [Tk, Hkv, Dv], Hq a multiple of Hkv"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cast them to one dtype")
    n_keys = sum(segments.k_lens) if segments.keys is None else k.shape[0]
    if sum(segments.q_lens) != q.shape[0] or n_keys != k.shape[0]:
        raise ValueError(
            f"segments of {sum(segments.q_lens)} queries and {n_keys} keys do not cover the "
            f"{q.shape[0]} queries and {k.shape[0]} keys given; padding is a segment of its own"
        )
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: a token sees at least itself, or pass None for no window")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks {list(sinks.shape)}: expected one logit for each of the {q.shape[1]} query heads")


def kernel_name(device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel of :func:`packed_attention` for ordinary layers, without sinks, soft caps and large heads."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "torch scaled_dot_product_attention"
    return "torch varlen_attn" if flash_attn_varlen_func is None else "flash_attn"


def _runs_varlen(q: Tensor, v: Tensor, sinks: Tensor | None, softcap: float | None) -> bool:
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and max(q.shape[2], v.shape[2]) <= _FLASH_HEAD_DIM
        and sinks is None
        and (softcap is None or flash_attn_varlen_func is not None)
    )


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    # The kernels want one head dim for all three, a multiple of 8. Zeros change neither logits nor other columns.
    head_dim = v.shape[2]
    width = math.ceil(max(q.shape[2], head_dim) / 8) * 8
    q, k, v = (x if x.shape[2] == width else F.pad(x, (0, width - x.shape[2])) for x in (q, k, v))
    left = -1 if window is None else window - 1
    ends = (segments.cu_q, segments.cu_k, max(segments.q_lens), max(segments.k_lens))
    if flash_attn_varlen_func is not None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            *ends,
            softmax_scale=scale,
            causal=True,
            window_size=(left, 0),
            softcap=softcap or 0.0,
            deterministic=deterministic,
        )
    elif _VARLEN_HAS_GQA:
        out = varlen_attn(q, k, v, *ends, scale=scale, window_size=(left, 0), enable_gqa=k.shape[1] != q.shape[1])
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = (x if groups == 1 else x.repeat_interleave(groups, dim=1) for x in (k, v))
        out = varlen_attn(q, k, v, *ends, scale=scale, window_size=(left, 0))
    return out[..., :head_dim]


def _fused(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    """Attention of ``n`` segments of one size: ``[n, Hq, a, D]`` over ``[n, Hkv, b, D]`` to ``[n, Hq, a, Dv]``."""
    head_dim = v.shape[3]
    if head_dim < k.shape[3]:  # latent attention; fused kernels want one head dim
        v = F.pad(v, (0, k.shape[3] - head_dim))
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type != "cpu":  # elsewhere, float32 kernels of linear memory take no grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    if q.shape[2] == k.shape[2] and (window is None or window >= k.shape[2]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        out = _concat(
            F.scaled_dot_product_attention(
                q[:, :, i:j],
                k[:, :, first:last],
                v[:, :, first:last],
                attn_mask=segments.mask(j - i, last - first, window, q.dtype),
                scale=scale,
                enable_gqa=grouped,
            )
            for i, j, first, last in _blocks(q, k, window)
        )
    return out[..., :head_dim]


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """The same by plain operations, for what fused kernels cannot do; linear memory, as blocks are recomputed."""
    groups = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, groups))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    sinks = None if sinks is None else sinks.view(-1, groups, 1)
    run = partial(_block, scale=scale, window=window, sinks=sinks, softcap=softcap)
    if torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    outs = (run(q[..., i:j, :], k[..., a:b, :], v[..., a:b, :]) for i, j, a, b in _blocks(q, k, window))
    return _concat(outs).flatten(1, 2)


def _block(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    logits = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~_visible(q.shape[-2], k.shape[-2], window, q.device), -torch.inf)
    total = logits.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(total.dtype))
    return (logits - total.unsqueeze(-1)).exp().to(v.dtype) @ v


def _blocks(q: Tensor, k: Tensor, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of queries and the keys they may see, as (first query, end, first key, end)."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    # With blocks no longer than the window, at most half of what a block computes is masked away.
    step = _BLOCK if window is None else min(max(window, 64), _BLOCK)
    shift = n_keys - n_queries
    for i in range(0, n_queries, step):
        j = min(i + step, n_queries)
        first = 0 if window is None else max(0, i + shift - window + 1)
        yield i, j, first, j + shift


def _visible(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query sees, bool ``[n_queries, n_keys]``, the last query standing at the last key."""
    places = torch.arange(n_keys, device=device)
    distance = places[n_keys - n_queries :, None] - places
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _concat(outs: Iterator[Tensor]) -> Tensor:
    blocks = list(outs)
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)
