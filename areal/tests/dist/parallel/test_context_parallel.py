"""Context-parallel attention compared with one process, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.attention.context_parallel import ContextParallel, choose_mode
from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention
from areal.engine.attention.token_stream import TokenStream

MODES = ("ulysses", "gather_kv")
HEADS = {"mha": (4, 4), "gqa": (8, 4), "kv2": (4, 2), "kv1": (4, 1), "kv3": (12, 3), "indivisible": (9, 3)}
# Single tokens, sequences within one chunk and across chunks; all but the first stream have padding at the end.
STREAMS = ((5, 1, 1, 7, 2, 16), (1, 30, 3), (3,))


def packed(tokens: int, heads: tuple[int, int], dims: tuple[int, int], seed: int) -> list[Tensor]:
    """Return q, k, v and sinks of a full stream, the same on every rank."""
    rng = torch.Generator().manual_seed(seed)
    (hq, hk), (d, dv) = heads, dims
    shapes = [(tokens, hq, d), (tokens, hk, d), (tokens, hk, dv), (hq,)]
    return [torch.randn(shape, dtype=torch.float64, generator=rng) for shape in shapes]


def error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp_min(1.0)).item()


def padded(length: int, align: int) -> int:
    return -(-length // align) * align


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_context_parallel_attention_equals_one_process(mode: str, heads: tuple[int, int]) -> None:
    cp = ContextParallel(dist.group.WORLD, mode)
    if mode == "ulysses" and heads[0] % cp.size:
        layout = cp.layout(TokenStream.of((8,), 8))
        q, k, v, _ = packed(8, heads, (4, 4), 0)
        with pytest.raises(ValueError, match=f"{heads[0]} query heads do not divide over {cp.size}"):
            layout.attend(cp.shard(q), cp.shard(k), cp.shard(v), AttentionOptions(scale=1.0))
        return
    # A window of 1 and one across chunks, latent attention's narrower values, with and without sinks and softcap.
    options = [(None, False, None, 4), (6, True, None, 4), (1, False, None, 4), (None, True, 2.0, 3)]
    for i, (seqlens, (window, has_sinks, softcap, dv)) in enumerate(itertools.product(STREAMS, options)):
        tokens = padded(sum(seqlens), cp.align)
        *qkv, sinks = packed(tokens, heads, (4, dv), seed=i)
        up = torch.randn(tokens, heads[0], dv, dtype=torch.float64, generator=torch.Generator().manual_seed(99 + i))

        reference = [x.clone().requires_grad_() for x in (*qkv, sinks)]
        tail = (tokens - sum(seqlens),) if tokens > sum(seqlens) else ()
        kwargs = {"scale": 0.7, "window": window, "softcap": softcap}
        expected = packed_attention(
            *reference[:3],
            Segments.of((*seqlens, *tail)),
            AttentionOptions(sinks=reference[3] if has_sinks else None, **kwargs),
        )
        expected.backward(up)

        local = [cp.shard(x).clone().requires_grad_() for x in qkv] + [sinks.clone().requires_grad_()]
        out = cp.layout(TokenStream.of(seqlens, tokens)).attend(
            *local[:3], AttentionOptions(sinks=local[3] if has_sinks else None, **kwargs)
        )
        out.backward(cp.shard(up))

        assert error(out, cp.shard(expected)) <= 1e-12
        for ours, theirs in zip(local[:3], reference[:3], strict=True):
            assert error(ours.grad, cp.shard(theirs.grad)) <= 1e-12
        if has_sinks:  # a parameter: gradients are summed over ranks
            total = local[3].grad.clone()
            dist.all_reduce(total)
            assert error(total, reference[3].grad) <= 1e-12


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("mode", MODES)
def test_gather_inverts_shard_and_its_backward_keeps_the_local_slice(mode: str) -> None:
    cp = ContextParallel(dist.group.WORLD, mode)
    tokens = 6 * cp.align
    stream = torch.arange(tokens * 3, dtype=torch.float64).view(tokens, 3)
    for length in (tokens, tokens - 1, 1):
        local = cp.shard(stream).clone().requires_grad_()
        assert local.shape == (tokens // cp.size, 3)
        gathered = cp.gather(local, length)
        assert torch.equal(gathered, stream[:length])
        up = torch.rand(length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        gathered.backward(up)
        assert torch.equal(local.grad, cp.shard(torch.cat([up, up.new_zeros(tokens - length, 3)])))
    for dtype in (torch.int64, torch.bfloat16):
        ids = torch.arange(tokens).to(dtype)
        assert torch.equal(cp.gather(cp.shard(ids), tokens - 2), ids[:-2])


@pytest.mark.world(2)
def test_padding_affects_neither_outputs_nor_gradients() -> None:
    for mode in MODES:
        cp = ContextParallel(dist.group.WORLD, mode)
        q, k, v, _ = packed(8, (2, 2), (4, 4), seed=0)
        outs, grads = [], []
        for fill in (0.0, 1e3):
            local = []
            for x in (q, k, v):
                x = x.clone()
                x[5:] = fill
                local.append(cp.shard(x).clone().requires_grad_())
            out = cp.gather(cp.layout(TokenStream.of((2, 3), 8)).attend(*local, AttentionOptions(scale=1.0)), 5)
            out.square().sum().backward()
            outs.append(out)
            grads.append([cp.gather(x.grad, 8) for x in local])
        assert torch.equal(*outs)
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)
            assert a[5:].abs().max() == 0


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("mode", MODES)
def test_mismatched_context_parallel_arguments_raise(mode: str) -> None:
    cp = ContextParallel(dist.group.WORLD, mode)
    with pytest.raises(ValueError, match=f"pad them to a multiple of {cp.align}"):
        cp.shard(torch.zeros(cp.align + 1))
    with pytest.raises(ValueError, match=f"pad them to a multiple of {cp.align}"):
        cp.layout(TokenStream.of((3,), 2 * cp.align + 1))
    with pytest.raises(ValueError, match=f"padded_length = {cp.align} is less than the {cp.align + 1} tokens"):
        cp.layout(TokenStream.of((cp.align, 1), cp.align))
    x = torch.zeros(cp.align, 4, 2)
    with pytest.raises(ValueError, match="this rank's share of the layout"):
        cp.layout(TokenStream.of((cp.align,), cp.align)).attend(x, x, x, AttentionOptions(scale=1.0))


@pytest.mark.world(2)
def test_positions_are_sharded_with_tokens() -> None:
    for mode in MODES:
        cp = ContextParallel(dist.group.WORLD, mode)
        full = TokenStream.of((2, 3, 1), 8).positions()
        assert full.tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
        assert torch.equal(cp.gather(cp.shard(full), 8), full)


@pytest.mark.world(2)
def test_one_layout_serves_layers_with_different_windows() -> None:
    cp = ContextParallel(dist.group.WORLD, choose_mode("auto", 2, 9, 3))
    assert cp.mode == "gather_kv"
    layout = cp.layout(TokenStream.of((20, 12), 32))
    q, k, v, _ = packed(32, (9, 3), (4, 4), seed=3)
    for window in (None, 4, None, 5):
        out = layout.attend(cp.shard(q), cp.shard(k), cp.shard(v), AttentionOptions(scale=0.5, window=window))
        full = packed_attention(q, k, v, Segments.of((20, 12)), AttentionOptions(scale=0.5, window=window))
        assert error(out, cp.shard(full)) <= 1e-12
