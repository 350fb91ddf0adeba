"""Inputs of log-prob functions."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX
from areal.utils.functional import HeadOutputs, HeadUpdate

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


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    topk: int | None = None,
) -> dict[str, Tensor]:
    """Compute the expected outputs of the head from full logits in float64."""
    z = hidden.double() @ weight.double().t()
    z = logit_scale * (z if bias is None else z + bias.double())
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(
        z / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature), -1
    )
    out = {}
    if targets is not None:
        wide = targets if targets.ndim == 2 else targets[:, None]
        picked = logp.gather(1, wide.clamp(min=0)) * (wide != IGNORE_INDEX)
        out["logprobs"] = picked.view(targets.shape)
    if entropy:
        out["entropy"] = -(logp.exp() * logp).sum(-1)
    if topk:
        out["topk"] = logp.topk(topk, -1).values
    return out


def compare(leaves: list[Tensor], got: dict[str, Tensor], want: dict[str, Tensor], tol: float) -> None:
    """Compare values and gradients, relative to the largest of each."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.shape == want[name].shape
        assert relative(x, want[name]) <= tol, name
    expected = torch.autograd.grad(scalar(want), leaves)
    for i, (g, e) in enumerate(zip(torch.autograd.grad(scalar(got), leaves), expected, strict=True)):
        assert relative(g, e) <= tol, f"gradient {i}"


def relative(x: Tensor, want: Tensor) -> float:
    if x.numel() == 0:
        return 0.0
    return float((x.detach().double() - want.detach().double()).abs().max() / want.detach().abs().max().clamp(min=1e-6))


def update_of(dtype: torch.dtype = torch.float64) -> HeadUpdate:
    rng = torch.Generator().manual_seed(11)
    down, up = (torch.randn(size, generator=rng, dtype=torch.float64).to(dtype) for size in ((2, H), (V, 2)))
    return HeadUpdate(down.requires_grad_(), up.requires_grad_(), 0.75)


CHUNK = 5

CHUNK_BYTES = CHUNK * V * 8
"""Bytes of the float64 logits of one chunk."""
