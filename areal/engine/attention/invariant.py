"""Causal attention whose bits do not depend on packing: blocks of keys begin at the start of each sequence.

A row of the result is computed from its query and the blocks of keys of its own sequence, in their order, by products of one size
(Dao et al., "FlashAttention", 2022, with an online softmax). Keys that a query does not see have the weight zero, so that the same bits
come out of a packed batch, a prefill in chunks, a prefix that several sequences share, and a single query with cached keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention
from areal.engine.attention.recomputation import always_recomputed
from areal.utils.functional.batch_invariant import TILE, batch_invariant

KEY_BLOCK = 64
"""Keys in a block."""

_LOW = -1e30
"""Maximum of no logits: finite, so that its difference from a logit is not NaN."""


def invariant_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    """Compute the same as :func:`~areal.engine.attention.kernels.packed_attention`, with bits that do not depend on other segments.

    Logits and sums are in at least float32. The backward is that of ``packed_attention``.

    Raises:
        ValueError: tokens of images see later ones.
    """
    if segments.bidirectional is not None or not segments.causal:
        raise ValueError("batch-invariant attention is causal: it does not support images whose tokens see each other")
    out: Tensor = _InvariantAttention.apply(q, k, v, options.sinks, segments, options)
    return out


class _InvariantAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.segments, ctx.options = segments, options
        # Segments with a common prefix read the same rows.
        if segments.keys is not None:
            k, v = k.index_select(0, segments.keys), v.index_select(0, segments.keys)
        # The backward computes its own products: results that selective checkpointing kept would not be read.
        with batch_invariant(), always_recomputed():
            return _attend(q, k, v, segments, options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Gradients may depend on the batch: the usual kernel computes its result again, and its gradients.
        inputs: list[Any] = [
            None if x is None else x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors
        ]
        q, k, v, sinks = inputs
        options = AttentionOptions(ctx.options.scale, ctx.options.window, sinks, ctx.options.softcap)
        with torch.enable_grad():
            out = packed_attention(q, k, v, ctx.segments, options)
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grads[0]))
        return *(None if x is None or not x.requires_grad else next(found) for x in inputs), None, None


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tiles of query rows, those with the most blocks of keys first. A row is a query with one of the heads that read the same key head.

    Attributes:
        rows: int64 ``[N, TILE]``. Index of each row; the number of rows for padding.
        positions: int64 ``[N, TILE]``. Position of each query in its sequence. Padding has that of the last query.
        first: int64 ``[N]``. Index of the first visible block in the list of all blocks.
        starts: int64 ``[N]``. Position of the first key of that block.
        counts: number of visible blocks of each tile, in descending order.
    """

    rows: Tensor
    positions: Tensor
    first: Tensor
    starts: Tensor
    counts: tuple[int, ...]

    def to(self, device: torch.device) -> _Tiles:
        """Return the tiles on a device."""
        rows, positions, first, starts = (x.to(device) for x in (self.rows, self.positions, self.first, self.starts))
        return _Tiles(rows, positions, first, starts, self.counts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each step, and how many tiles have a block in it."""
        active = len(self.counts)
        for step in range(self.counts[0] if self.counts else 0):
            while self.counts[active - 1] <= step:
                active -= 1
            yield step, active


def _tiles(segments: Segments, groups: int, window: int | None) -> _Tiles:
    """Return the tiles of all segments.

    Args:
        groups: number of query heads that read one key head.
        window: sliding window of the layer, or ``None``.
    """
    n_rows = sum(segments.q_lens) * groups
    rows, positions, first, starts, counts = [], [], [], [], []
    row_start = block_start = 0
    for queries, keys in zip(segments.q_lens, segments.k_lens, strict=True):
        # Rows of a segment: all heads of its first query, then those of the second one.
        index = torch.arange(-(-queries * groups // TILE) * TILE).view(-1, TILE)
        of_query = (index // groups).clamp_max(queries - 1) + keys - queries
        rows.append(torch.where(index < queries * groups, index + row_start, n_rows))
        positions.append(of_query)
        # Blocks begin at the first key of the segment, which is the first token of its sequence.
        earliest = of_query[:, 0] if window is None else (of_query[:, 0] - window + 1).clamp_min(0)
        earliest = earliest // KEY_BLOCK if window is not None else torch.zeros_like(earliest)
        first.append(earliest + block_start)
        starts.append(earliest * KEY_BLOCK)
        counts.append(of_query[:, -1] // KEY_BLOCK + 1 - earliest)
        row_start += queries * groups
        block_start += -(-keys // KEY_BLOCK)
    order = torch.cat(counts).argsort(descending=True, stable=True)
    of_rows, of_positions, of_first, of_starts = (torch.cat(each)[order] for each in (rows, positions, first, starts))
    return _Tiles(of_rows, of_positions, of_first, of_starts, tuple(torch.cat(counts)[order].tolist()))


def _key_blocks(x: Tensor, segments: Segments) -> Tensor:
    """Return keys or values ``[Tk, Hkv, D]`` in blocks ``[blocks, Hkv, KEY_BLOCK, D]``, those of a segment padded with zeros."""
    index, start = [], 0
    for keys in segments.k_lens:
        mine = torch.arange(-(-keys // KEY_BLOCK) * KEY_BLOCK)
        index.append(torch.where(mine < keys, mine + start, len(x)))
        start += keys
    padded = F.pad(x, (0, 0, 0, 0, 0, 1))
    blocks = padded.index_select(0, torch.cat(index).to(x.device)).unflatten(0, (-1, KEY_BLOCK))
    return blocks.transpose(1, 2).contiguous()


def _attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    """Return attention within each segment ``[Tq, Hq, Dv]``, for keys of the segments end to end."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    n_queries, kv_heads, head_dim = len(q), k.shape[1], v.shape[2]
    groups = q.shape[1] // kv_heads
    tiles = _tiles(segments, groups, options.window).to(q.device)
    key_blocks, value_blocks = (_key_blocks(x.to(wide), segments) for x in (k, v))

    # Tiles of rows, [N, Hkv, TILE, D]. The row after the last one is padding.
    flat = q.to(wide).view(n_queries, kv_heads, groups, -1).transpose(1, 2).flatten(0, 1)
    flat = F.pad(flat, (0, 0, 0, 0, 0, 1)).index_select(0, tiles.rows.flatten())
    queries = flat.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()

    # Maximum, sum of exponentials and weighted sum of values of each row, over the blocks so far.
    n = len(queries)
    top = queries.new_full((n, kv_heads, TILE, 1), _LOW)
    total = torch.zeros_like(top)
    out = queries.new_zeros(n, kv_heads, TILE, head_dim)
    if options.sinks is not None:
        # A sink is a logit without a value, before all others.
        of_rows = options.sinks.to(wide).view(kv_heads, groups)[:, tiles.rows % groups]
        top, total = of_rows.transpose(0, 1).unsqueeze(-1).contiguous(), torch.ones_like(top)
    offsets = torch.arange(KEY_BLOCK, device=q.device)
    for step, active in tiles:
        index = tiles.first[:active] + step
        # Which keys of the block each row sees, [active, 1, TILE, KEY_BLOCK].
        at = (tiles.starts[:active] + step * KEY_BLOCK)[:, None, None] + offsets
        distance = tiles.positions[:active, :, None] - at
        visible = distance >= 0
        if options.window is not None:
            visible &= distance < options.window
        logits = _products(queries[:active], key_blocks.index_select(0, index).transpose(2, 3)) * options.scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
        # What was summed so far is scaled to the new maximum. A block without visible keys changes nothing.
        highest = torch.maximum(top[:active], logits.amax(-1, keepdim=True))
        before, weights = torch.exp(top[:active] - highest), torch.exp(logits - highest)
        top[:active] = highest
        total[:active] = total[:active] * before + weights.sum(-1, keepdim=True)
        out[:active] = out[:active] * before + _products(weights, value_blocks.index_select(0, index))

    # Back to the order of the queries; rows of padding are dropped.
    rows = (out / total).transpose(1, 2).flatten(0, 1)
    result = rows.new_empty(n_queries * groups + 1, kv_heads, head_dim)
    result.index_copy_(0, tiles.rows.flatten(), rows)
    return (
        result[:-1]
        .view(n_queries, groups, kv_heads, head_dim)
        .transpose(1, 2)
        .reshape(n_queries, -1, head_dim)
        .to(dtype)
    )


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of ``[n, h, TILE, m]`` and ``[n, h, m, k]``."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
