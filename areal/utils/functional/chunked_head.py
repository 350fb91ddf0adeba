"""A language-model head that computes logits for one chunk of tokens at a time.

The forward keeps per-token results (entropy, ids of the most likely tokens), and the logits of as many chunks as fit into a
memory bound. The backward recomputes the logits of the other chunks, and turns the logits of each chunk into gradients. With
``p = softmax(z)``, its entropy ``H`` and a chosen token ``y``:

    d log p_y / d z_j = [j = y] - p_j
    d H       / d z_j = -p_j (log p_j + H)

A pass is an operation that reads or writes all logits of a chunk, matrix products included. The passes of log-probs alone:

    forward   product, log_softmax
    backward  [product,] softmax, scale, product (hidden states), product (weight)

These are two and four, and five with recomputed logits. More are needed by a softcap (two forward, two backward), the entropy
(three and three), top-k (three forward), a sharded vocabulary (two forward), an update of the weight (one forward, two
backward), the gradient of a bias (one), and a temperature per token with a bias or 16-bit operands (one forward). Logits are
never rounded to 16 bits. Where operands of 16 bits are multiplied (see :mod:`areal.utils.functional.product`), the gradient
of the logits is rounded once; sums of gradients are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX
from areal.utils.functional.head_spec import HeadSpec
from areal.utils.functional.product import add_product, product


class _Chunks:
    """Logits of ``hidden`` ``[T, H]``, chunk by chunk, in buffers that all chunks reuse.

    Args:
        hidden, weight, bias: ``[T, H]``, ``[V, H]`` and ``[V]``.
        low, up: ``[T, r]`` and ``[V, r]``. ``low @ up.T`` is added to the product of hidden states and weight.
        spec: settings of the head.
        kept: logits of the first chunks, from the forward. They are neither recomputed nor overwritten.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        spec: HeadSpec,
        kept: Sequence[Tensor] = (),
    ) -> None:
        self.dtypes = spec.dtypes(hidden, weight)
        self.hidden = hidden
        self.weight = weight.to(self.dtypes.inputs)
        self.bias = None if bias is None else bias.to(self.dtypes.stats)
        self.low = None if low is None else low.to(self.dtypes.results)
        self.up = None if up is None else up.to(self.dtypes.results)
        self.spec = spec
        self.kept = list(kept)
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[slice]:
        tokens, size = self.hidden.shape[0], self.spec.chunk_size
        return (slice(i, min(i + size, tokens)) for i in range(0, tokens, size))

    @cached_property
    def gradient_weight(self) -> Tensor:
        """Weight ``[V, H]`` for the product with gradients of logits."""
        return self.weight.to(self.dtypes.results)

    def buffer(self, name: str, rows: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer ``[rows, V]`` to write into, by default in the dtype of the statistics."""
        # Reused: on a CPU, a page fault for new memory costs more than writing it.
        if name not in self._buffers:
            size = min(self.spec.chunk_size, self.hidden.shape[0])
            dtype = dtype or self.dtypes.stats
            self._buffers[name] = self.hidden.new_empty(size, self.weight.shape[0], dtype=dtype)
        return self._buffers[name][: rows.stop - rows.start]

    def per_token(self, value: float | Tensor, rows: slice) -> float | Tensor:
        return value[rows].to(self.dtypes.stats).unsqueeze(1) if isinstance(value, Tensor) else value

    def factor(self, rows: slice) -> float | Tensor:
        """Return the derivative of a logit by the product of hidden state and weight, without softcap: number or ``[rows, 1]``."""
        return self.spec.logit_scale / self.per_token(self.spec.temperature, rows)

    def compute(self, rows: slice) -> Tensor:
        """Compute the logits ``[rows, V]`` of the next chunk, and keep them if one more chunk fits into the bound."""
        buffer = self.buffer("logits", rows)
        if (len(self.kept) + 1) * self._buffers["logits"].nbytes > self.spec.keep_bytes:
            return self._write(rows, buffer)
        self.kept.append(self._write(rows))
        return self.kept[-1]

    def logits(self, rows: slice) -> Tensor:
        """Return the logits ``[rows, V]`` of a chunk: kept, or computed again."""
        chunk = rows.start // self.spec.chunk_size
        return self.kept[chunk] if chunk < len(self.kept) else self._write(rows, self.buffer("logits", rows))

    def _write(self, rows: slice, buffer: Tensor | None = None) -> Tensor:
        """Return logits after scale, softcap and temperature, in the buffer or in new memory."""
        if self.spec.scale_logits:
            return self._scaled_afterwards(rows, buffer)
        # A number is a factor of the product itself. Factors per token scale the hidden states if these are not rounded.
        cap, factor = self.spec.softcap, self.factor(rows)
        scale = self.spec.logit_scale / cap if cap is not None else factor
        hidden, low = self.hidden[rows], None if self.low is None else self.low[rows]
        per_token = None if isinstance(scale, float) else scale
        if per_token is not None and self.bias is None and self.dtypes.inputs == self.dtypes.stats:
            hidden, low = hidden * per_token, None if low is None else low * per_token
            per_token = None
        number = scale if isinstance(scale, float) else 1.0
        z = product(hidden, self.weight.t(), self.dtypes.stats, spare=buffer, bias=self.bias, scale=number)
        if low is not None and self.up is not None:
            add_product(z, low if number == 1.0 else low * number, self.up.t())
        if per_token is not None:
            z.mul_(per_token)
        # Softcap is followed by the temperature: cap * tanh(scale * x / cap) / temperature.
        return z if cap is None else z.tanh_().mul_(cap / self.per_token(self.spec.temperature, rows))

    def _scaled_afterwards(self, rows: slice, buffer: Tensor | None) -> Tensor:
        """Return logits as :func:`_write` does, with the operations of :func:`areal.utils.functional.logprobs.logits` in their order."""
        spec = self.spec
        z = product(self.hidden[rows], self.weight.t(), self.dtypes.stats, spare=buffer, bias=self.bias)
        if self.low is not None and self.up is not None:
            add_product(z, self.low[rows], self.up.t())
        if spec.logit_scale != 1.0:
            z.mul_(spec.logit_scale)
        if spec.softcap is not None:
            z.div_(spec.softcap).tanh_().mul_(spec.softcap)
        return z.div_(self.per_token(spec.temperature, rows))

    def softcap_tanh(self, z: Tensor, rows: slice) -> Tensor | None:
        """Return the tanh of the softcap at logits ``z`` ``[rows, V]``; ``None`` without a softcap."""
        cap = self.spec.softcap
        if cap is None:
            return None
        # z = cap * tanh(...) / temperature, hence tanh(...) = z * temperature / cap.
        return torch.mul(z, self.per_token(self.spec.temperature, rows) / cap, out=self.buffer("tanh", rows))


@dataclass
class _Gradients:
    """Gradients of the outputs, in the form that the formulas above need.

    Attributes:
        picked: ``[T, K]``. Gradients of the log-probs of the chosen tokens; 0 at positions without a target.
        entropy: ``[T]``, or ``None``. Gradient of the entropy.
        ids: int64 ``[T, K]``. Chosen tokens, as columns of this rank's logits.
        is_local: bool ``[T, K]``. True for chosen tokens in the vocabulary shard of this rank.
    """

    picked: Tensor
    entropy: Tensor | None
    ids: Tensor
    is_local: Tensor

    def to_logits(self, chunks: _Chunks, rows: slice, log_share: Tensor | None, entropy: Tensor | None) -> Tensor:
        """Return the gradient ``[rows, V]`` of the product of hidden states and weight, for one chunk.

        ``log_share`` ``[T]`` is the log-probability of this rank's rows of the vocabulary, ``None`` for all of it.
        """
        # The tanh must be read from the logits before their buffer is overwritten.
        z = chunks.logits(rows)
        tanh = chunks.softcap_tanh(z, rows)
        factor = chunks.factor(rows)
        share = 1.0 if log_share is None else log_share[rows].exp().unsqueeze(1)

        # Each chosen token y contributes g_y ([j = y] - p_j). The sum over y of the second term is -p_j * sum(g).
        picked = self.picked[rows] * factor
        picked_sum = picked.sum(1, keepdim=True) * share
        local = picked * self.is_local[rows]
        out = chunks.buffer("logits", rows)
        if self.entropy is None or entropy is None:
            p = torch.softmax(z, 1, out=out)
            if tanh is None and chunks.bias is None and chunks.dtypes.results != chunks.dtypes.stats:
                return self._rounded(chunks, rows, p, -picked_sum, local)
            grad = p.mul_(-picked_sum)
        else:
            # Together with the entropy's gradient g: p_j * (-g log p_j - g H - sum(g_y)). On this rank log p_j is the
            # result of log_softmax plus log_share.
            p = torch.softmax(z, 1, out=chunks.buffer("probs", rows))
            logp = torch.log_softmax(z, 1, out=out)
            entropy_grad = self.entropy[rows].unsqueeze(1) * factor * share
            rest = entropy[rows] if log_share is None else entropy[rows] + log_share[rows]
            grad = logp.mul_(-entropy_grad).sub_(entropy_grad * rest.unsqueeze(1) + picked_sum).mul_(p)

        # The first term, on the rank that has the token's column.
        grad.scatter_add_(1, self.ids[rows], local)
        return grad if tanh is None else torch.ops.aten.tanh_backward.grad_input(grad, tanh, grad_input=grad)

    def _rounded(self, chunks: _Chunks, rows: slice, p: Tensor, scale: Tensor, local: Tensor) -> Tensor:
        """Return ``p * scale`` plus ``local`` at the chosen tokens, rounded once. Overwrites ``p``."""
        dtype, ids = chunks.dtypes.results, self.ids[rows]
        grad = torch.mul(p, scale, out=chunks.buffer("gradient", rows, dtype))
        # Sums at the chosen tokens are computed in p, whose other elements are not needed any more.
        p.scatter_(1, ids, p.gather(1, ids) * scale).scatter_add_(1, ids, local)
        return grad.scatter_(1, ids, p.gather(1, ids).to(dtype))


class ChunkedHead(torch.autograd.Function):
    """Autograd function of the head.

    ``(hidden, weight, bias, low, up, targets, spec) -> (logprobs, entropy, topk_logprobs, topk_ids)``

    ``low`` and ``up`` are ``[T, r]`` and ``[V, r]``, the factors of an addition to the logits, or ``None``. ``targets`` is
    int64 ``[T, K]``, or ``None``. Outputs are ``[T, K]``, ``[T]``, ``[T, k]`` and ``[T, k]``; outputs that are not requested
    are ``None``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        targets: Tensor | None,
        spec: HeadSpec,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        # 1. Statistics of this rank's logits, chunk by chunk. Without targets, zero tokens are picked at each position.
        chunks = _Chunks(hidden, weight, bias, low, up, spec)
        picked_ids = hidden.new_empty(hidden.shape[0], 0, dtype=torch.int64) if targets is None else targets
        local, is_local = spec.shard.localize(picked_ids)
        stats = [_statistics(chunks.compute(rows), chunks, rows, local[rows]) for rows in chunks]
        lse, entropy, picked, best, best_ids = _concatenate(stats, chunks, picked_ids.shape[1])

        # 2. Statistics of the full vocabulary: merge the ranks' statistics.
        lse, log_share, full_entropy, picked = spec.shard.merge(
            lse, entropy if spec.entropy else None, picked, is_local
        )

        # 3. Outputs. A target outside the vocabulary gets NaN: raising here would make the host wait for the device.
        logprobs, topk_logprobs, topk_ids = None, None, None
        if targets is not None:
            unknown = ((targets < 0) | (targets >= spec.shard.total)) & (targets != IGNORE_INDEX)
            logprobs = picked.masked_fill(targets == IGNORE_INDEX, 0.0).masked_fill_(unknown, float("nan"))
        if spec.topk:
            best, topk_ids = spec.shard.merge_topk(best, best_ids + spec.shard.start)
            topk_logprobs = best - lse.unsqueeze(1)
            ctx.mark_non_differentiable(topk_ids)

        # 4. Keep per-token results and, up to the bound, logits.
        ctx.save_for_backward(hidden, weight, bias, low, up, targets, log_share, full_entropy, topk_ids, *chunks.kept)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return logprobs, full_entropy, topk_logprobs, topk_ids

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_topk: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():  # once_differentiable would let a constant upstream gradient pass, and lose a term
            raise RuntimeError(
                "head_outputs is differentiable once: its backward keeps no graph. Call backward without create_graph=True, "
                "or differentiate areal.utils.functional.logits twice"
            )
        hidden, weight, bias, low, up, targets, log_share, entropy, topk_ids, *kept = ctx.saved_tensors
        inputs = (hidden, weight, bias, low, up)
        spec: HeadSpec = ctx.spec
        # 1. Bring the gradients of all outputs into one form.
        chunks = _Chunks(*inputs, spec, kept)
        output_grads = _output_gradients(chunks, (grad_logprobs, targets), (grad_topk, topk_ids), grad_entropy)
        # 2. Accumulate over chunks, and ranks, in the dtype of the statistics. The result is rounded once.
        wide = chunks.dtypes.stats
        grad_hidden, grad_weight, grad_bias, grad_low, grad_up = (
            torch.zeros_like(x, dtype=wide) if wanted else None
            for x, wanted in zip(inputs, ctx.needs_input_grad[:5], strict=True)
        )
        for rows in chunks:
            grad = output_grads.to_logits(chunks, rows, log_share, entropy)
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0))
            grad = grad.to(chunks.dtypes.results)
            if grad_hidden is not None:
                product(grad, chunks.gradient_weight, wide, into=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight, grad.t(), hidden[rows])
            if grad_low is not None and chunks.up is not None:
                product(grad, chunks.up, wide, into=grad_low[rows])
            if grad_up is not None and chunks.low is not None:
                add_product(grad_up, grad.t(), chunks.low[rows])
        # 3. Every rank of a sharded vocabulary has a summand of the gradients of tensors that are equal on all ranks.
        grad_hidden, grad_low = (None if x is None else spec.shard.sum(x) for x in (grad_hidden, grad_low))
        grads = (grad_hidden, grad_weight, grad_bias, grad_low, grad_up)
        rounded = [None if grad is None else grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)]
        return (*rounded, None, None)  # type: ignore[return-value]


_Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Per token, over this rank's rows of the vocabulary: log-sum-exp ``[n]`` (0 if nothing needs it), entropy ``[n]`` (0 if not
requested), log-probs of the targets ``[n, K]``, the largest logits ``[n, k]`` and their columns ``[n, k]``."""


def _statistics(z: Tensor, chunks: _Chunks, rows: slice, local: Tensor) -> _Statistics:
    """Return the statistics of a chunk's logits ``z`` ``[n, V]``."""
    spec = chunks.spec
    # Read from the logits what is needed of them: their buffer may be overwritten below.
    best, best_ids = _largest(z, spec.topk) if spec.topk else (z[:, :0].clone(), local[:, :0])
    needs_lse = bool(spec.topk) or spec.shard.group is not None
    top = z.amax(1) if needs_lse else None
    # On a CPU, softmax is faster than exp of the log-probs.
    p = torch.softmax(z, 1, out=chunks.buffer("probs", rows)) if spec.entropy else None
    # One kernel, which reads a row three times. On a CPU the row is in the cache then.
    logp = torch.log_softmax(z, 1, out=chunks.buffer("logits", rows))
    picked = logp.gather(1, local)
    # The log-sum-exp is z - log p at any token. Both numbers are small at the most likely one.
    lse = picked.new_zeros(picked.shape[0]) if top is None else top - logp.amax(1)
    entropy = torch.zeros_like(lse) if p is None else p.mul_(logp).sum(1).neg_()
    return lse, entropy, picked, best, best_ids


def _largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest logits of a chunk ``[n, V]``, and their columns, both ``[n, k]``."""
    values, columns = z.topk(min(k, z.shape[1]), dim=1)
    # A rank of a sharded vocabulary may have fewer than k rows. The merge of all ranks never chooses an infinite filler.
    missing = k - values.shape[1]
    if missing:
        values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
        columns = torch.nn.functional.pad(columns, (0, missing))
    return values, columns


def _concatenate(stats: list[_Statistics], chunks: _Chunks, n_targets: int) -> _Statistics:
    """Concatenate the statistics of all chunks."""
    # Without tokens there are no chunks: return empty tensors of the right shapes.
    if not stats:
        empty = chunks.hidden.new_empty(0, dtype=chunks.dtypes.stats)
        best = empty.new_empty(0, chunks.spec.topk)
        return empty, empty, empty.new_empty(0, n_targets), best, best.long()
    lse, entropy, picked, best, best_ids = (torch.cat(tensors) for tensors in zip(*stats, strict=True))
    return lse, entropy, picked, best, best_ids


def _output_gradients(
    chunks: _Chunks,
    logprobs: tuple[Tensor | None, Tensor | None],
    topk: tuple[Tensor | None, Tensor | None],
    entropy: Tensor | None,
) -> _Gradients:
    """Combine the gradients of the outputs. For the backward, the most likely tokens are additional targets."""
    # Start with zero columns, so that cat() works if neither log-probs nor top-k received a gradient.
    none = chunks.hidden.new_empty(chunks.hidden.shape[0], 0, dtype=chunks.dtypes.stats)
    picked, ids = [none], [none.long()]
    for grad, tokens in (logprobs, topk):
        if grad is not None and tokens is not None:
            picked.append(grad.masked_fill(tokens == IGNORE_INDEX, 0.0))
            ids.append(tokens)
    local, is_local = chunks.spec.shard.localize(torch.cat(ids, dim=1))
    return _Gradients(picked=torch.cat(picked, dim=1), entropy=entropy, ids=local, is_local=is_local)
