"""Inputs of log-prob functions."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX
from areal.utils.functional import HeadOutputs

T, V, H, K = 13, 37, 8, 3


def make(dtype: torch.dtype = torch.float64, *, tokens: int = T, columns: int | None = None) -> tuple[Tensor, ...]:
    """Return hidden states, weight, bias, targets (some missing) and a temperature per token."""
    rng = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (tokens,) if columns is None else (tokens, columns), generator=rng)
    if tokens > 4:
        targets[2] = IGNORE_INDEX
        targets[4:, ...][-1:] = IGNORE_INDEX
        if columns:
            targets[3, 0] = IGNORE_INDEX
    temperature = torch.rand(tokens, generator=rng, dtype=torch.float64) + 0.5
    return hidden, weight, bias, targets, temperature


def named(outputs: HeadOutputs) -> dict[str, Tensor]:
    topk = None if outputs.topk is None else outputs.topk.logprobs
    result = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, "topk": topk}
    return {name: x for name, x in result.items() if x is not None}


def scalar(outputs: dict[str, Tensor]) -> Tensor:
    """Reduce to a scalar in which every element of every output has its own weight, of either sign."""
    return sum(
        (
            (x * torch.sin(torch.arange(x.numel(), dtype=x.dtype) + i).view(x.shape)).sum()
            for i, x in enumerate(outputs.values())
        ),
        start=torch.zeros((), dtype=torch.float64),
    )


CHUNK = 5


CHUNK_BYTES = CHUNK * V * 8
"""Bytes of the float64 logits of one chunk."""
