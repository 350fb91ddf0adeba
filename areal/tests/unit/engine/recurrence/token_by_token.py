"""The recurrences of recurrent layers, one token after the other, for one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.attention.token_stream import TokenStream


@dataclass(frozen=True)
class Tree:
    """Runs of a stream: tokens of each, and the tokens of the stream before it in its sequence."""

    runs: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def length(self) -> int:
        return sum(length for length, _ in self.runs)

    def contexts(self) -> list[Tensor]:
        starts = torch.tensor([length for length, _ in self.runs]).cumsum(0).tolist()
        return [
            torch.tensor([*before, *range(end - length, end)])
            for (length, before), end in zip(self.runs, starts, strict=True)
        ]

    def stream(self) -> TokenStream:
        contexts = self.contexts()
        return TokenStream(tuple(n for n, _ in self.runs), tuple(map(len, contexts)), tuple(contexts))

    def each(self, compute: Callable[..., Tensor], *xs: Tensor) -> Tensor:
        """Compute the sequence of each run by itself, and return the tokens of the stream."""
        ends = [compute(*(x[c] for x in xs))[-n:] for (n, _), c in zip(self.runs, self.contexts(), strict=True)]
        return torch.cat(ends)


TREES = {
    "one": Tree(((20, ()),)),
    "token": Tree(((1, ()),)),
    "sequences": Tree(((9, ()), (1, ()), (14, ()), (2, ()))),
    # Branches of a whole run, of the middle of one, of its first token, and of a branch.
    "branches": Tree(
        (
            (10, ()),
            (5, tuple(range(6))),
            (2, tuple(range(10))),
            (1, ()),
            (3, (*range(6), *range(10, 15))),
            (20, ()),
            (2, (0,)),
            (4, (*range(6), *range(10, 15), 18, 19)),
        )
    ),
}


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """``g`` is ``[T, H]`` or ``[T, H, Dk]``."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    k, q = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (k, q))
    state, out = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for t in range(len(q)):
        decay = g[t].exp()
        state = state * (decay[:, None, None] if decay.ndim == 1 else decay[:, :, None])
        new = beta[t][:, None] * (v[t] - torch.einsum("hd,hde->he", k[t], state))
        state = state + k[t][:, :, None] * new[:, None, :]
        out.append(torch.einsum("hd,hde->he", q[t] * q.shape[-1] ** -0.5, state))
    return torch.stack(out)


def state_space(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """``a`` and ``d`` are given for each token, so that gradients pass."""
    b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (b, c))
    state, out = x.new_zeros(x.shape[1], b.shape[2], x.shape[2]), []
    for t in range(len(x)):
        state = (a[t] * dt[t]).exp()[:, None, None] * state + b[t][:, :, None] * (dt[t][:, None] * x[t])[:, None, :]
        out.append(torch.einsum("hn,hnp->hp", c[t], state) + d[t][:, None] * x[t])
    return torch.stack(out)


def selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    state, out = torch.zeros_like(a[0]), []
    for t in range(len(x)):
        state = (a[t] * dt[t][:, None]).exp() * state + (dt[t] * x[t])[:, None] * b[t]
        out.append(state @ c[t] + d[t] * x[t])
    return torch.stack(out)


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``[T, channels]``; weight ``[T, channels, K]`` and bias are those of the first token."""
    padded = F.pad(x.T[None], (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[0].unsqueeze(1), bias[0], groups=x.shape[1]))[0].T
