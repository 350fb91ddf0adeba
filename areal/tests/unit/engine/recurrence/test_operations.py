"""Operations of recurrent layers over streams of sequences and branches, beside each sequence token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from areal.engine.attention.token_stream import TokenStream
from areal.engine.recurrence.chunks import ChunkSizes, RunChunks
from areal.engine.recurrence.convolution import causal_convolution
from areal.engine.recurrence.delta_rule import gated_delta_rule
from areal.engine.recurrence.state_space import selective_scan, state_space_scan
from areal.tests.unit.engine.recurrence import token_by_token as one
from areal.tests.unit.engine.recurrence.token_by_token import TREES, Tree

CHUNKS = (1, 3, 8, 64)
trees = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def between(low: float, high: float, *shape: int) -> Tensor:
    return (low + (high - low) * torch.rand(*shape, dtype=torch.float64)).requires_grad_()


def check(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Compare outputs and the gradients of a random projection."""
    factors = torch.randn_like(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    found, wanted = (torch.autograd.grad((out * factors).sum(), inputs) for out in (actual, expected))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def chunks_of(tree: Tree, tokens: int) -> RunChunks:
    return RunChunks.of(tree.stream(), ChunkSizes(tokens, 3))


@trees
@pytest.mark.parametrize("tokens", CHUNKS)
@pytest.mark.parametrize("channels", [False, True])
def test_delta_rule(tree: Tree, tokens: int, channels: bool) -> None:
    torch.manual_seed(0)
    t, heads, dim = tree.length, 4, 3
    inputs = [normal(t, 2, dim), normal(t, 2, dim), normal(t, heads, 5)]
    inputs += [between(-0.1, 0, *((t, heads, dim) if channels else (t, heads))), between(0, 1, t, heads)]
    actual = gated_delta_rule(chunks_of(tree, tokens), *inputs, normalize=True)
    check(actual, tree.each(one.delta_rule, *inputs), inputs)


def rows(*weights: Tensor, of: Tree) -> list[Tensor]:
    return [weight.expand(of.length, *weight.shape) for weight in weights]


@trees
@pytest.mark.parametrize("tokens", CHUNKS)
def test_state_space(tree: Tree, tokens: int) -> None:
    torch.manual_seed(0)
    t, heads = tree.length, 4
    inputs = [normal(t, heads, 3), between(0, 1, t, heads), between(-0.1, 0, heads)]
    inputs += [normal(t, 2, 5), normal(t, 2, 5), normal(heads)]
    x, dt, a, b, c, d = inputs
    actual = state_space_scan(chunks_of(tree, tokens), *inputs)
    a, d = rows(a, d, of=tree)
    check(actual, tree.each(one.state_space, x, dt, a, b, c, d), inputs)


@trees
def test_selective_scan(tree: Tree) -> None:
    torch.manual_seed(0)
    t, channels = tree.length, 6
    inputs = [normal(t, channels), between(0, 1, t, channels), between(-0.1, 0, channels, 4)]
    inputs += [normal(t, 4), normal(t, 4), normal(channels)]
    x, dt, a, b, c, d = inputs
    actual = selective_scan(chunks_of(tree, 1), *inputs)
    a, d = rows(a, d, of=tree)
    check(actual, tree.each(one.selective, x, dt, a, b, c, d), inputs)


@trees
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolution(tree: Tree, taps: int) -> None:
    """Also with a shorter kernel than that for which the layout was made."""
    torch.manual_seed(0)
    x, weight, bias = inputs = [normal(tree.length, 5), normal(5, taps), normal(5)]
    actual = causal_convolution(chunks_of(tree, 8), x.T[None], weight, bias, "silu")[0].T
    expected = tree.each(one.convolution, x, *rows(weight, bias, of=tree))
    check(actual, expected, inputs)


def test_longer_kernel_than_the_layout_is_refused() -> None:
    x = torch.zeros(1, 2, 20)
    with pytest.raises(ValueError, match="a convolution over 5 tokens, where the layout holds 4"):
        causal_convolution(chunks_of(TREES["one"], 8), x, torch.zeros(2, 5))


def test_steps_follow_the_longest_sequence() -> None:
    chunks = RunChunks.of(TokenStream.of((30, 1, 64, 65, 2), 170), ChunkSizes(32, 3))
    # The last run is padding. Chunks: 1, 1, 2, 3, 1 and 1.
    assert chunks.counts == (6, 2, 1)
    assert chunks.tokens.shape == (9 * 32,)


def strong_decay(rule: Callable[..., Tensor]) -> Tensor:
    torch.manual_seed(0)
    t = 40
    g = torch.full((t, 2), -1000.0, dtype=torch.float64, requires_grad=True)
    chunks = RunChunks.of(TokenStream.of((t,), t), ChunkSizes(16, 3))
    rule(chunks, g).sum().backward()
    return g.grad


def test_strong_decay_gives_no_nan() -> None:
    """Exponentials of differences neither overflow nor are a difference of infinities."""
    q = torch.randn(40, 2, 3, dtype=torch.float64)
    grad = strong_decay(lambda chunks, g: gated_delta_rule(chunks, q, q, q, g, q.new_ones(40, 2), normalize=True))
    assert grad.isfinite().all()
    grad = strong_decay(lambda chunks, g: state_space_scan(chunks, q, -g, q.new_full((2,), -1.0), q, q))
    assert grad.isfinite().all()
