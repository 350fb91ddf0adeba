"""Causal attention over packed sequences, ``[T, heads, dim]`` in and out, independent of models and ranks.

Tokens of an image may see each other in both directions; see :class:`Bidirectional`.

On a GPU in half precision: flash_attn if installed, else torch's ``varlen_attn``, which on a Hopper GPU may be FlashAttention 3. Otherwise:
scaled dot-product attention on one run of segments of equal size at a time, so that neither a ``T x T`` mask nor padding is allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from areal.engine.attention.capability import VARLEN_TAKES_GROUPS, activate_flash_attention_3, runs_options, runs_varlen
from areal.engine.attention.recomputation import always_recomputed
from areal.engine.attention.sinks import SINKS_SUPPORTED, SinkAttention, TorchVarlen

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

_BLOCK = 512
"""Queries in a block if a mask must be materialized. Bounds the mask to ``_BLOCK`` rows."""


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Settings of one attention layer.

    Attributes:
        scale: multiplies ``q @ k``.
        window: key ``j`` is visible to query ``i`` if ``0 <= i - j < window``. ``None``: every earlier key is visible.
        sinks: ``[Hq]``. One logit per head that enters only the denominator of the softmax.
        softcap: logits become ``softcap * tanh(logits / softcap)``, before masking and sinks.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True, eq=False)
class Segments:
    """Boundaries of packed sequences. Queries of a segment see keys of the same segment only, and none after their own.

    Segments are stored end to end. Queries and keys of a segment are aligned at their ends: with ``a`` queries and
    ``b >= a`` keys, query ``i`` has the position of key ``i + b - a``. Segments without queries are left out.

    Attributes:
        q_lens, k_lens: number of queries and of keys of each segment, on the host.
        cu_q, cu_k: int32 ``[n + 1]``, on the device. Start of each segment, as cumulative sums of the lengths.
        keys: int64 ``[sum(k_lens)]``, on the device. Rows of the given keys and values that the segments see, which may
            repeat. ``None``: the keys of the segments are stored end to end, too.
        causal: False if queries also see the keys after their own.
        bidirectional: tokens that see later ones, too; ``None`` if there are none.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor
    keys: Tensor | None = None
    causal: bool = True
    bidirectional: Bidirectional | None = None
    _masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        q_lens: Sequence[int],
        k_lens: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        keys: Tensor | None = None,
        **others: Any,
    ) -> Segments:
        """Return segments of the given lengths, and ``others``. ``k_lens`` defaults to ``q_lens``. ``keys`` may be on any device.

        Raises:
            ValueError: a segment is without queries, or its keys are fewer than its queries.
        """
        k_lens = q_lens if k_lens is None else k_lens
        if len(q_lens) != len(k_lens) or any(not 0 < a <= b for a, b in zip(q_lens, k_lens, strict=False)):
            raise ValueError(
                f"q_lens = {tuple(q_lens)}, k_lens = {tuple(k_lens)}: "
                "each segment needs 1 <= queries <= keys; leave empty ones out"
            )
        cu_q = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32).to(device)
        cu_k = cu_q if k_lens is q_lens else torch.tensor([0, *accumulate(k_lens)], dtype=torch.int32).to(device)
        return cls(tuple(q_lens), tuple(k_lens), cu_q, cu_k, None if keys is None else keys.to(device), **others)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Segments:
        """Apply ``fn`` to the tensors on the device. The result is without masks."""
        keys = None if self.keys is None else fn(self.keys)
        groups = None if self.bidirectional is None else self.bidirectional.map(fn)
        return dataclasses.replace(self, cu_q=fn(self.cu_q), cu_k=fn(self.cu_k), keys=keys, bidirectional=groups)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs of adjacent segments of equal size, as (number of segments, queries of each, keys of each)."""
        return [(len(list(run)), a, b) for (a, b), run in groupby(zip(self.q_lens, self.k_lens, strict=True))]

    def mask(self, n_queries: int, n_keys: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask for logits ``[n_queries, n_keys]``, aligned at their ends. Built once for all layers.

        ``None`` for a single query, which sees all keys.
        """
        if n_queries == 1:
            return None
        # Every layer's backward keeps the mask: one tensor for all layers instead of one for each.
        key = (n_queries, n_keys, window, dtype)
        if key not in self._masks:
            visible = _visible(n_queries, n_keys, window, self.cu_q.device, self.causal)
            self._masks[key] = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
                ~visible, -torch.inf
            )
        return self._masks[key]


@dataclass(frozen=True, eq=False)
class Bidirectional:
    """Tokens that see each other in both directions, in groups, such as those of an image. All see the keys before their group, too.

    Attributes:
        segments: one for each group, with ``causal = False``. Its last query is the last token of the group.
        queries: int64, on the device. Rows of the given queries that are those of ``segments``, which may repeat.
        rows: int64 ``[n]``, on the device. Rows of the result of causal attention that are replaced.
        taken: int64 ``[n]``, on the device. Index of the new result of each of these rows among those of ``segments``.
    """

    segments: Segments
    queries: Tensor
    rows: Tensor
    taken: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> Bidirectional:
        """Apply ``fn`` to the tensors on the device."""
        return Bidirectional(self.segments.map(fn), fn(self.queries), fn(self.rows), fn(self.taken))


def packed_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    """Compute causal attention within each segment. Exact, and differentiable in ``q``, ``k``, ``v`` and the sinks.

    The rows of ``segments.bidirectional`` also see later tokens of their group. With a window, they see none further back.

    Args:
        q, k, v: ``[Tq, Hq, D]``, ``[Tk, Hkv, D]`` and ``[Tk, Hkv, Dv]``, of one floating dtype. ``Hq`` is a multiple of
            ``Hkv``; query head ``h`` reads key head ``h // (Hq / Hkv)``.
        segments: on the device of ``q``. The lengths sum to ``Tq`` and ``Tk``; with ``segments.keys``, ``Tk`` is arbitrary.
        options: scale, window, sinks and softcap of the layer.

    Returns:
        ``[Tq, Hq, Dv]``, in the dtype of ``q``.

    Raises:
        ValueError: shapes, dtypes or lengths do not match.
    """
    _check_arguments(q, k, v, segments, options)
    out = _attend(q, k, v, segments, options)
    if segments.bidirectional is None:
        return out
    # The causal kernel computed these rows, too. They are few, and this way text needs no copies of its keys.
    images = segments.bidirectional
    seen = _attend(TakeRows.apply(q, images.queries), k, v, images.segments, options)
    return out.index_copy(0, images.rows, seen.index_select(0, images.taken))


def _attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    """Compute attention within each segment, without :attr:`Segments.bidirectional`."""
    # Segments with a common prefix read the same rows: give each segment its own copy, end to end.
    if segments.keys is not None:
        k, v = (TakeRows.apply(x, segments.keys) for x in (k, v))

    # Fast path: one kernel call.
    if _runs_varlen(q, v, options) and (segments.causal or options.sinks is None):
        return _varlen(q, k, v, segments, options)

    # Otherwise one call per run of equal segments, batched as [n, heads, tokens, dim]. No padding is needed within a run.
    runs = segments.runs
    queries = q.split([n * a for n, a, _ in runs])
    keys = k.split([n * b for n, _, b in runs])
    values = v.split([n * b for n, _, b in runs])
    outs = []
    for (n, _, _), qs, ks, vs in zip(runs, queries, keys, values, strict=True):
        qs, ks, vs = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in (qs, ks, vs))
        # Fused kernels support neither sinks nor softcap.
        attention = _fused if options.sinks is None and options.softcap is None else _unfused
        out = attention(qs, ks, vs, segments, options)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


class TakeRows(torch.autograd.Function):
    """Rows of a tensor by index, where an index may repeat. Gradients of repeated rows are summed in at least float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.like = index, (x.shape, x.dtype)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shape, dtype = ctx.like
        # Summing many readers of a row in bfloat16 would round small summands away.
        wide = torch.promote_types(dtype, torch.float32)
        total = grads[0].new_zeros(shape, dtype=wide)
        return total.index_add_(0, ctx.index, grads[0].to(wide)).to(dtype), None


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> None:
    # Shapes and dtypes of the three tensors.
    if q.dim() != 3 or k.shape[2] != q.shape[2] or v.shape[:2] != k.shape[:2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: "
            "expected [Tq, Hq, D], [Tk, Hkv, D] and [Tk, Hkv, Dv], Hq a multiple of Hkv"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cast them to one dtype")
    # Segments must cover all queries; with an index, keys may be left out or repeated.
    n_keys = sum(segments.k_lens) if segments.keys is None else k.shape[0]
    if sum(segments.q_lens) != q.shape[0] or n_keys != k.shape[0]:
        raise ValueError(
            f"segments of {sum(segments.q_lens)} queries and {n_keys} keys do not cover the "
            f"{q.shape[0]} queries and {k.shape[0]} keys given; padding is a segment of its own"
        )
    window, sinks = options.window, options.sinks
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: a token sees at least itself, or pass None for no window")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks {list(sinks.shape)}: expected one logit for each of the {q.shape[1]} query heads")


def kernel_name(device: torch.device, dtype: torch.dtype, *, softcap: bool = False, sinks: bool = False) -> str:
    """Return the kernel of :func:`packed_attention` for layers with these options. Logs once why a GPU runs no kernel of its own."""
    if not (runs_varlen(device, dtype, head_dim=8) and _runs_options(device, softcap, sinks)):
        return "plain operations in blocks" if softcap or sinks else "torch scaled_dot_product_attention"
    if not softcap and activate_flash_attention_3(device):
        return "torch varlen_attn, FlashAttention 3"
    return "torch varlen_attn" if flash_attn_varlen_func is None or sinks else "flash_attn"


def _runs_varlen(q: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Return whether a variable-length kernel supports these tensors and options."""
    if q.device.type == "cpu" or not runs_varlen(q.device, q.dtype, max(q.shape[2], v.shape[2])):
        return False
    return _runs_options(q.device, options.softcap is not None, options.sinks is not None)


def _runs_options(device: torch.device, softcap: bool, sinks: bool) -> bool:
    flash = flash_attn_varlen_func is not None
    return runs_options(device, softcap=softcap, sinks=sinks, flash_attn=flash, sink_kernel=SINKS_SUPPORTED)


def _runs_flash_attn(q: Tensor, options: AttentionOptions) -> bool:
    """Return whether the flash_attn package computes what a variable-length kernel supports."""
    if flash_attn_varlen_func is None or options.sinks is not None:
        return False
    return options.softcap is not None or not activate_flash_attention_3(q.device)


def _varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    """Compute attention by a kernel for segments of different lengths."""
    # The kernels need one head dim for q, k and v, a multiple of 8. Zeros change neither logits nor other columns.
    head_dim = v.shape[2]
    width = math.ceil(max(q.shape[2], head_dim) / 8) * 8
    q, k, v = (x if x.shape[2] == width else F.pad(x, (0, width - x.shape[2])) for x in (q, k, v))
    # The kernels count the keys to the left and right of the query's own key; -1 means no limit.
    sides = (-1 if options.window is None else options.window - 1, 0 if segments.causal else -1)
    ends = (segments.cu_q, segments.cu_k, max(segments.q_lens), max(segments.k_lens))
    if _runs_flash_attn(q, options):
        deterministic = torch.are_deterministic_algorithms_enabled()
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            *ends,
            softmax_scale=options.scale,
            causal=segments.causal,
            window_size=sides,
            softcap=options.softcap or 0.0,
            deterministic=deterministic,
        )
    else:
        grouped: dict[str, Any] = {}
        if VARLEN_TAKES_GROUPS:
            grouped["enable_gqa"] = k.shape[1] != q.shape[1]
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if options.sinks is not None:
            out = SinkAttention.apply(q, k, v, options.sinks, TorchVarlen(ends, options.scale, sides[0], grouped))
        else:
            out = varlen_attn(q, k, v, *ends, scale=options.scale, window_size=sides, **grouped)
    return out[..., :head_dim]


def _fused(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    """Compute attention of ``n`` segments of equal size by fused kernels.

    Args:
        q, k, v: ``[n, Hq, a, D]``, ``[n, Hkv, b, D]`` and ``[n, Hkv, b, Dv]``.

    Returns:
        ``[n, Hq, a, Dv]``.
    """
    window = options.window
    head_dim = v.shape[3]
    if head_dim < k.shape[3]:  # multi-head latent attention; fused kernels need one head dim
        v = F.pad(v, (0, k.shape[3] - head_dim))
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type != "cpu":  # on a GPU, float32 kernels with linear memory do not support grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    causal = segments.causal
    if (q.shape[2] == k.shape[2] or not causal) and (window is None or window >= k.shape[2]):
        # Plain causal attention, and attention to all keys, need no mask.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=options.scale, enable_gqa=grouped)
    else:
        # A window, or more keys than queries: a mask is needed. Blocks of queries bound its size.
        out = _concat(
            F.scaled_dot_product_attention(
                q[:, :, i:j],
                k[:, :, first:last],
                v[:, :, first:last],
                attn_mask=segments.mask(j - i, last - first, window, q.dtype),
                scale=options.scale,
                enable_gqa=grouped,
            )
            for i, j, first, last in _blocks(q, k, window, causal=causal)
        )
    return out[..., :head_dim]


def _unfused(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    """Compute the same as :func:`_fused` by plain operations, with sinks and softcap.

    Memory is linear in the length: the backward recomputes one block of queries at a time, with any activation checkpointing.
    """
    # Group query heads by key head, so that keys broadcast over their group: [n, Hkv, groups, tokens, dim].
    groups = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, groups))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    sinks = None if options.sinks is None else options.sinks.view(-1, groups, 1)
    run = partial(_block, options=dataclasses.replace(options, sinks=sinks), causal=segments.causal)
    if torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    blocks = _blocks(q, k, options.window, causal=segments.causal)
    return _concat(run(q[..., i:j, :], k[..., a:b, :], v[..., a:b, :]) for i, j, a, b in blocks).flatten(1, 2)


@always_recomputed()
def _block(q: Tensor, k: Tensor, v: Tensor, *, options: AttentionOptions, causal: bool) -> Tensor:
    """Compute attention of one block of queries, with softmax statistics in at least float32."""
    logits = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    visible = _visible(q.shape[-2], k.shape[-2], options.window, q.device, causal)
    logits = logits.masked_fill(~visible, -torch.inf)
    # A sink is one more logit in the softmax whose value is zero: it enters the denominator only.
    total = logits.logsumexp(-1)
    if options.sinks is not None:
        total = torch.logaddexp(total, options.sinks.to(total.dtype))
    return (logits - total.unsqueeze(-1)).exp().to(v.dtype) @ v


def _blocks(q: Tensor, k: Tensor, window: int | None, *, causal: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield blocks of queries and the keys visible to them, as (first query, end, first key, end). All of an image are one block."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    # With blocks no longer than the window, at most half of what a block computes is masked away.
    step = n_queries if not causal else _BLOCK if window is None else min(max(window, 64), _BLOCK)
    shift = n_keys - n_queries
    for i in range(0, n_queries, step):
        j = min(i + step, n_queries)
        # Query i has the position of key i + shift; the window reaches back from the first query of the block.
        first = 0 if window is None else max(0, i + shift - window + 1)
        yield i, j, first, j + shift


def _visible(n_queries: int, n_keys: int, window: int | None, device: torch.device, causal: bool = True) -> Tensor:
    """Return the keys visible to each query, bool ``[n_queries, n_keys]``. The last query has the position of the last key."""
    positions = torch.arange(n_keys, device=device)
    distance = positions[n_keys - n_queries :, None] - positions
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if window is None else visible & (distance < window)


def _concat(outs: Iterator[Tensor]) -> Tensor:
    blocks = list(outs)
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)
