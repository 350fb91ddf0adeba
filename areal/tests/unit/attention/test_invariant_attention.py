"""Attention whose bits do not depend on packing, prefixes, chunks of a prefill, or cached keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from areal.engine.attention.invariant import invariant_attention
from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 100, 33)
"""Lengths on both sides of the borders of tiles and blocks."""

HEADS = (6, 2, 12)
CASES = {
    "full": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, window=20),
    "softcap": AttentionOptions(0.3, softcap=2.0),
    "sinks": AttentionOptions(0.3, sinks=torch.linspace(-1, 1, HEADS[0])),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def inputs(dtype: torch.dtype, tokens: int = sum(LENGTHS)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim = HEADS
    return [torch.randn(tokens, n, dim, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_sequence_has_the_same_bits_in_every_way(name: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    options = CASES[name]
    packed = invariant_attention(q, k, v, Segments.of(LENGTHS), options)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        # Alone.
        alone = invariant_attention(q[rows], k[rows], v[rows], Segments.of([length]), options)
        assert torch.equal(alone, packed[rows])
        # The last tokens after cached keys: a step of generation, and a chunk of a prefill.
        for chunk in {1, min(7, length)}:
            step = invariant_attention(q[rows][-chunk:], k[rows], v[rows], Segments.of([chunk], [length]), options)
            assert torch.equal(step, packed[rows][-chunk:])
        start += length


def test_a_shared_prefix_has_the_bits_of_copies() -> None:
    q, k, v = inputs(torch.float32, 90)
    options = CASES["full"]
    # A prefix of 50 tokens, and two branches of 21 and 19.
    branches = [torch.arange(50), torch.cat([torch.arange(50), torch.arange(50, 71)])]
    branches.append(torch.cat([torch.arange(50), torch.arange(71, 90)]))
    shared = Segments.of([50, 21, 19], [50, 71, 69], keys=torch.cat(branches))
    out = invariant_attention(q, k, v, shared, options)
    for index in branches[1:]:
        whole = invariant_attention(q[index], k[index], v[index], Segments.of([len(index)]), options)
        assert torch.equal(out[index], whole)


def test_the_usual_kernel_has_other_bits_with_cached_keys() -> None:
    q, k, v = inputs(torch.float32, 100)
    whole = packed_attention(q, k, v, Segments.of([100]), CASES["full"])
    step = packed_attention(q[-1:], k, v, Segments.of([1], [100]), CASES["full"])
    assert not torch.equal(step, whole[-1:])


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_usual_kernel(name: str) -> None:
    results = []
    for kernel in (invariant_attention, packed_attention):
        q, k, v = (x.requires_grad_() for x in inputs(torch.float64))
        sinks = None if CASES[name].sinks is None else CASES[name].sinks.double().requires_grad_()
        options = AttentionOptions(0.3, CASES[name].window, sinks, CASES[name].softcap)
        out = kernel(q, k, v, Segments.of(LENGTHS), options)
        wanted = [x for x in (q, k, v, sinks) if x is not None]
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for mine, usual in zip(*results, strict=True):
        torch.testing.assert_close(mine, usual, rtol=1e-10, atol=1e-12)


def test_images_are_refused() -> None:
    q, k, v = inputs(torch.float32, 4)
    with pytest.raises(ValueError, match="images"):
        invariant_attention(q, k, v, Segments.of([4], causal=False), CASES["full"])
