"""Attention with sinks by a kernel that knows none, corrected exactly by its log-sum-exp.

A sink ``s`` is one more logit of a head's softmax, without a value. With the kernel's result ``o`` and log-sum-exp ``l``:

    l' = log(e^l + e^s)                    o' = o * e^(l - l')

The backward of flash attention computes probabilities as ``e^(logit - l)``, and needs ``rowsum(do * o)``. Given ``l'`` and
``o'`` it therefore returns the gradients of q, k and v with the sink, and

    ds = -sum over queries of e^(s - l') * rowsum(do * o')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from areal.engine.attention.capability import VARLEN_TAKES_GROUPS


class SinkKernel(Protocol):
    """Forward and backward of an attention without sinks, with its log-sum-exp."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result ``[Tq, Hq, D]``, the log-sum-exp ``[Hq, Tq]`` in at least float32, and the random state."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, random_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""


@dataclass(frozen=True, eq=False)
class TorchVarlen:
    """The kernel below torch's ``varlen_attn``, whose own backward takes no other log-sum-exp.

    Attributes:
        ends: starts of the queries and keys of each segment, and the longest of both.
        scale: multiplies ``q @ k``.
        left: number of visible keys before a query's own; -1 for all.
        grouped: options for heads of queries that share heads of keys.
    """

    ends: tuple[Tensor, Tensor, int, int]
    scale: float
    left: int
    grouped: dict[str, Any]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        forward = torch.ops.torch_attn._varlen_attn
        out: tuple[Tensor, Tensor, Tensor] = forward(
            q, k, v, *self.ends, self.left == -1, scale=self.scale, window_size=[self.left, 0], **self.grouped
        )
        return out

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, random_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = torch.ops.torch_attn._varlen_attn_backward
        options = {"scale": self.scale, "window_size": [self.left, 0]}
        grads: tuple[Tensor, Tensor, Tensor] = backward(
            grad, q, k, v, out, lse, *self.ends, self.left == -1, random_state, **options
        )
        return grads


class SinkAttention(torch.autograd.Function):
    """``(q, k, v, sinks, kernel) -> [Tq, Hq, D]``: attention by a kernel, with sinks ``[Hq]``. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: SinkKernel) -> Tensor:
        out, lse, random_state = kernel.forward(q, k, v)
        total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
        # One factor per query and head. The product is rounded once, to the dtype of the result.
        out = (out * (lse - total).exp().t().unsqueeze(2)).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total, random_state)
        ctx.kernel = kernel
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, total, random_state = ctx.saved_tensors
        grads: Sequence[Tensor] = ctx.kernel.backward(grad.contiguous(), q, k, v, out, total, random_state)
        weight = (sinks.to(total.dtype).unsqueeze(1) - total).exp()
        moved = (grad.to(total.dtype) * out).sum(2).t()
        return (*grads, (weight * moved).sum(1).neg_().to(sinks.dtype), None)


SINKS_SUPPORTED = VARLEN_TAKES_GROUPS
"""Whether torch's kernel can be corrected for sinks. The arguments of its operations were read in torch 2.13, and have not
changed since ``enable_gqa`` came; torch 2.11 runs plain operations."""
