"""Attention in which the tokens of an image see each other in both directions, compared with a dense mask in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from areal.api import MicroBatchSpec
from areal.engine.attention import kernels
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.gather_kv import plan_keys, zigzag_shard
from areal.engine.attention.kernels import AttentionOptions, packed_attention
from areal.engine.attention.token_stream import TokenStream
from areal.engine.stream.layout import StreamLayout, layout_of
from areal.utils.data import plan_batch
from areal.utils.data.images import SquareRules

# Two images in a sequence, one at the end of it and one at the beginning of the next, a sequence of text, and one of an image alone.
LENGTHS = (13, 9, 4, 6)
IMAGES = ((2, 5), (9, 13), (13, 17), (26, 32))
PADDED = 40

# A common prefix of 7 tokens with an image, continued by two runs, of which one has an image; and a branch from the middle of a run.
TREE_LENGTHS = (9, 6, 3)
TREE_CONTEXTS = (range(9), (*range(7), *range(9, 15)), (*range(7), *range(9, 13), *range(15, 18)))
TREE_IMAGES = ((2, 6), (10, 13))


def packed_stream() -> TokenStream:
    marked = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    for start, stop in IMAGES:
        marked[start:stop] = True
    return TokenStream.of(LENGTHS, PADDED, None, marked)


def tree_stream() -> TokenStream:
    contexts = tuple(torch.tensor(list(context)) for context in TREE_CONTEXTS)
    lengths = (*map(len, contexts), 2)
    return TokenStream((*TREE_LENGTHS, 2), lengths, contexts, TREE_IMAGES)


STREAMS = {"packed": (packed_stream, IMAGES), "tree": (tree_stream, TREE_IMAGES)}


def dense_mask(stream: TokenStream, images: Any, window: int | None) -> Tensor:
    """Return which keys each query sees, bool ``[T, T]``: OR(causal, same image), within the window to the left."""
    visible = torch.zeros(len(stream), len(stream), dtype=torch.bool)
    start = 0
    for length, context in zip(stream.lengths, stream.contexts(), strict=True):
        for query in range(start, start + length):
            at = context.tolist().index(query)
            for position, key in enumerate(context.tolist()):
                same = any(first <= query < stop and first <= key < stop for first, stop in images)
                near = window is None or at - position < window
                visible[query, key] = near and (position <= at or same)
        start += length
    return visible


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logits = logits.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:
        logits = torch.cat([logits, options.sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(k)], v)


def inputs(tokens: int) -> list[Tensor]:
    """Return q, k, v and sinks in float64, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 4, 6), (tokens, 2, 6), (tokens, 2, 6), (4,)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


def assert_equal_with_gradients(ours: Tensor, theirs: Tensor, used: list[Tensor]) -> None:
    up = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    pairs = [(ours, theirs)]
    pairs += zip(*(torch.autograd.grad(out, used, up) for out in (ours, theirs)), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) <= 1e-12


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize(("with_sinks", "softcap"), [(False, None), (True, 2.0)], ids=["fused", "unfused"])
def test_images_see_themselves_in_both_directions(
    monkeypatch: pytest.MonkeyPatch, name: str, window: int | None, with_sinks: bool, softcap: float | None
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 4)
    make, images = STREAMS[name]
    stream = make()
    *qkv, sinks = inputs(len(stream))
    options = AttentionOptions(0.5, window, sinks if with_sinks else None, softcap)
    out = packed_attention(*qkv, stream.segments("cpu"), options)
    expected = dense(*qkv, dense_mask(stream, images, window), options)
    assert_equal_with_gradients(out, expected, [*qkv, sinks] if with_sinks else qkv)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("size", [2, 5])
def test_images_are_cut_by_the_chunks_of_gathered_keys(name: str, window: int | None, size: int) -> None:
    """Each rank's queries see the keys of their images that are in chunks of other ranks."""
    make, images = STREAMS[name]
    stream = make()
    # Both streams divide by both sizes.
    assert len(stream) % 20 == 0
    qkv = inputs(len(stream))[:3]
    options = AttentionOptions(0.5, window)
    gathered = [torch.cat([zigzag_shard(x, rank, size) for rank in range(size)]) for x in qkv[1:]]
    local = [
        packed_attention(
            zigzag_shard(qkv[0], rank, size), *gathered, plan_keys(stream, rank, size, window, "cpu"), options
        )
        for rank in range(size)
    ]
    expected = dense(*qkv, dense_mask(stream, images, window), options)
    expected = torch.cat([zigzag_shard(expected, rank, size) for rank in range(size)])
    assert_equal_with_gradients(torch.cat(local), expected, qkv)


def test_images_of_two_sequences_are_two() -> None:
    stream = packed_stream()
    assert stream.images == IMAGES
    groups = stream.segments("cpu").bidirectional
    assert groups is not None
    assert groups.segments.q_lens == (3, 4, 4, 6)
    # An image's keys begin with its sequence, and end with the image.
    assert groups.segments.k_lens == (5, 13, 4, 6)
    assert torch.equal(groups.queries, groups.rows)


def test_text_has_no_copies_of_its_keys() -> None:
    marked = torch.zeros(9, dtype=torch.bool)
    segments = TokenStream.of((4, 5), 12, None, marked).segments("cpu")
    assert segments.bidirectional is None
    assert segments.keys is None
    assert packed_stream().segments("cpu").keys is None


def test_layout_made_with_a_micro_batch_and_one_made_later_are_equal() -> None:
    """A micro-batch without a layout gets one with the same images."""
    cp, ids = ContextParallel(None), torch.tensor([1, 9, 9, 2, 3])
    plan = plan_batch(
        [{"input_ids": ids, "pixel_values": torch.zeros(1, 1, 2, 2)}],
        MicroBatchSpec(),
        images=SquareRules(9, 2, (1, 2, 2)),
    )
    layout = functools.partial(StreamLayout.of, cp=cp, rows=False)
    mbs = [plan.build(n_mbs=1, device=torch.device("cpu"), layout=each)[0] for each in (layout, None)]
    assert mbs[0].layout is not None
    assert mbs[1].layout is None
    assert [layout_of(mb, cp, rows=False).stream.images for mb in mbs] == [((1, 3),)] * 2


def test_kernels_of_a_gpu_are_called_for_text_and_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, causal: bool, window_size: Any, **_: Any) -> Tensor:
        calls.append(("flash", len(q), len(k), causal, window_size))
        return torch.empty_like(q)

    def varlen(q: Tensor, k: Tensor, v: Tensor, *args: Any, window_size: Any, **_: Any) -> Tensor:
        calls.append(("varlen", len(q), len(k), window_size))
        return torch.empty_like(q)

    monkeypatch.setattr(kernels, "_runs_varlen", lambda *_: True)
    monkeypatch.setattr(kernels, "varlen_attn", varlen)
    segments = packed_stream().segments("cpu")
    for kernel in (None, flash):
        monkeypatch.setattr(kernels, "flash_attn_varlen_func", kernel)
        with FakeTensorMode(allow_non_fake_inputs=True):
            qkv = [torch.empty(PADDED, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2)]
            for window in (None, 4):
                out = packed_attention(*qkv, segments, AttentionOptions(0.5, window))
                assert out.shape == qkv[0].shape
    queries, keys = 17, 28
    assert calls == [
        ("varlen", PADDED, PADDED, (-1, 0)),
        ("varlen", queries, keys, (-1, -1)),
        ("varlen", PADDED, PADDED, (3, 0)),
        ("varlen", queries, keys, (3, -1)),
        ("flash", PADDED, PADDED, True, (-1, 0)),
        ("flash", queries, keys, False, (-1, -1)),
        ("flash", PADDED, PADDED, True, (3, 0)),
        ("flash", queries, keys, False, (3, -1)),
    ]
