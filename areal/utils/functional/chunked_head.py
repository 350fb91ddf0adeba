"""A language-model head that computes logits for one chunk of tokens at a time.

The forward keeps per-token results (log-sum-exp, entropy, ids of the most likely tokens), and the logits of as many chunks
as fit into a memory bound. The backward recomputes the logits of the other chunks, and turns the logits of each chunk into
gradients. With ``p = softmax(z)``, its entropy ``H`` and a chosen token ``y``:

    d log p_y / d z_j = [j = y] - p_j
    d H       / d z_j = -p_j (log p_j + H)

A chunk costs three matrix products with kept logits, and four with recomputed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX
from areal.utils.functional.vocab_parallel import VocabShard


@dataclass(frozen=True)
class HeadSpec:
    """Settings of a head: how logits are computed from hidden states, and which results are requested.

    Attributes:
        temperature: number, or ``[T]``.
        logit_scale: factor of the model on its logits.
        softcap: bound of the model on its logits, or ``None``.
        fp32: whether to multiply in float32 (or wider).
        entropy: whether to compute the entropy.
        topk: number of most likely tokens to return; 0 for none.
        chunk_size: number of tokens whose logits exist at a time.
        keep_bytes: memory for logits that are kept for the backward.
        shard: rows of the vocabulary on this rank.
    """

    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    fp32: bool
    entropy: bool
    topk: int
    chunk_size: int
    keep_bytes: int
    shard: VocabShard

    def dtypes(self, hidden: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the matrix products, and of logits and everything computed from them (float32 or float64)."""
        compute = torch.promote_types(hidden.dtype, weight.dtype)
        stats = torch.promote_types(compute, torch.float32)
        return (stats if self.fp32 else compute), stats


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
        self.matmul_dtype, self.stats_dtype = spec.dtypes(hidden, weight)
        self.hidden = hidden
        self.weight = weight.to(self.matmul_dtype)
        self.bias = None if bias is None else bias.to(self.matmul_dtype)
        self.low = None if low is None else low.to(self.matmul_dtype)
        self.up = None if up is None else up.to(self.matmul_dtype)
        self.spec = spec
        self.kept = list(kept)
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[slice]:
        tokens, size = self.hidden.shape[0], self.spec.chunk_size
        return (slice(i, min(i + size, tokens)) for i in range(0, tokens, size))

    def buffer(self, name: str, rows: slice) -> Tensor:
        """Return a buffer ``[rows, V]`` to write into."""
        # Reused: on a CPU, a page fault for new memory costs more than writing it.
        if name not in self._buffers:
            size = min(self.spec.chunk_size, self.hidden.shape[0])
            self._buffers[name] = self.hidden.new_empty(size, self.weight.shape[0], dtype=self.stats_dtype)
        return self._buffers[name][: rows.stop - rows.start]

    def hidden_of(self, rows: slice) -> Tensor:
        return self.hidden[rows].to(self.matmul_dtype)

    def per_token(self, value: float | Tensor, rows: slice) -> float | Tensor:
        return value[rows].to(self.stats_dtype).unsqueeze(1) if isinstance(value, Tensor) else value

    def factor(self, rows: slice) -> float | Tensor:
        """Return the derivative of a logit by the product of hidden state and weight, without softcap: number or ``[rows, 1]``."""
        return self.spec.logit_scale / self.per_token(self.spec.temperature, rows)

    def compute(self, rows: slice) -> Tensor:
        """Compute the logits ``[rows, V]`` of the next chunk, and keep them if one more chunk fits into the bound."""
        buffer = self.buffer("logits", rows)
        if (len(self.kept) + 1) * self._buffers["logits"].nbytes > self.spec.keep_bytes:
            return self._write(rows, buffer)
        self.kept.append(self._write(rows, torch.empty_like(buffer)))
        return self.kept[-1]

    def logits(self, rows: slice) -> Tensor:
        """Return the logits ``[rows, V]`` of a chunk: kept, or computed again."""
        chunk = rows.start // self.spec.chunk_size
        return self.kept[chunk] if chunk < len(self.kept) else self._write(rows, self.buffer("logits", rows))

    def _write(self, rows: slice, z: Tensor) -> Tensor:
        """Write logits after scale, softcap and temperature to ``z``."""
        # The product goes directly into the buffer, unless its dtype is narrower.
        h, w = self.hidden_of(rows), self.weight.t()
        out = z if self.matmul_dtype == self.stats_dtype else None
        product = torch.mm(h, w, out=out) if self.bias is None else torch.addmm(self.bias, h, w, out=out)
        if out is None:
            z.copy_(product)
        if self.low is not None and self.up is not None:
            _add_product(z, self.low[rows], self.up.t())
        # Softcap is followed by the temperature: cap * tanh(scale * x / cap) / temperature.
        cap = self.spec.softcap
        if cap is not None:
            z.mul_(self.spec.logit_scale / cap).tanh_().mul_(cap / self.per_token(self.spec.temperature, rows))
            return z
        factor = self.factor(rows)
        return z if isinstance(factor, float) and factor == 1.0 else z.mul_(factor)

    def softcap_slope(self, z: Tensor, rows: slice) -> Tensor | None:
        """Return the derivative of the softcap, ``1 - tanh^2``, at logits ``z`` ``[rows, V]``; ``None`` without a softcap."""
        cap = self.spec.softcap
        if cap is None:
            return None
        # z = cap * tanh(...) / temperature, hence tanh(...) = z * temperature / cap.
        slope = torch.mul(z, self.per_token(self.spec.temperature, rows) / cap, out=self.buffer("slope", rows))
        return slope.square_().neg_().add_(1.0)


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

    def to_logits(self, chunks: _Chunks, rows: slice, lse: Tensor, entropy: Tensor | None) -> Tensor:
        """Return the gradient ``[rows, V]`` of the product of hidden states and weight, for one chunk."""
        # The softcap's slope must be read from the logits before their buffer is overwritten.
        z = chunks.logits(rows)
        slope = chunks.softcap_slope(z, rows)
        factor = chunks.factor(rows)

        # Each chosen token y contributes g_y ([j = y] - p_j). The sum over y of the second term is -p_j * sum(g).
        picked = self.picked[rows] * factor
        picked_sum = picked.sum(1, keepdim=True)
        logp = torch.sub(z, lse[rows].unsqueeze(1), out=chunks.buffer("logits", rows))
        if self.entropy is None or entropy is None:
            grad = logp.exp_().mul_(picked_sum.neg_())
        else:
            # Together with the entropy's gradient g: p_j * (-g log p_j - g H - sum(g_y)).
            p = torch.exp(logp, out=chunks.buffer("probs", rows))
            entropy_grad = self.entropy[rows].unsqueeze(1) * factor
            grad = logp.mul_(-entropy_grad).sub_(entropy_grad * entropy[rows].unsqueeze(1) + picked_sum).mul_(p)

        # The first term, on the rank that has the token's column.
        grad.scatter_add_(1, self.ids[rows], picked * self.is_local[rows])
        return grad if slope is None else grad.mul_(slope)


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
        lse, full_entropy, picked = spec.shard.merge(
            lse, entropy if spec.entropy else None, picked.masked_fill(~is_local, 0)
        )

        # 3. Outputs. A target outside the vocabulary gets NaN: raising here would make the host wait for the device.
        logprobs, topk_logprobs, topk_ids = None, None, None
        if targets is not None:
            unknown = ((targets < 0) | (targets >= spec.shard.total)) & (targets != IGNORE_INDEX)
            logprobs = (picked - lse.unsqueeze(1)).masked_fill_(targets == IGNORE_INDEX, 0.0)
            logprobs = logprobs.masked_fill_(unknown, float("nan"))
        if spec.topk:
            best, topk_ids = spec.shard.merge_topk(best, best_ids + spec.shard.start)
            topk_logprobs = best - lse.unsqueeze(1)
            ctx.mark_non_differentiable(topk_ids)

        # 4. Keep per-token results and, up to the bound, logits.
        ctx.save_for_backward(hidden, weight, bias, low, up, targets, lse, full_entropy, topk_ids, *chunks.kept)
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
        hidden, weight, bias, low, up, targets, lse, entropy, topk_ids, *kept = ctx.saved_tensors
        inputs = (hidden, weight, bias, low, up)
        spec: HeadSpec = ctx.spec
        # 1. Bring the gradients of all outputs into one form.
        output_grads = _output_gradients(spec.shard, (grad_logprobs, targets), (grad_topk, topk_ids), grad_entropy, lse)
        chunks = _Chunks(*inputs, spec, kept)
        # 2. Accumulate over chunks, and ranks, in the dtype of the statistics. The result is rounded once.
        grad_hidden, grad_weight, grad_bias, grad_low, grad_up = (
            torch.zeros_like(x, dtype=chunks.stats_dtype) if wanted else None
            for x, wanted in zip(inputs, ctx.needs_input_grad[:5], strict=True)
        )
        for rows in chunks:
            grad = output_grads.to_logits(chunks, rows, lse, entropy)
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0))
            grad = grad.to(chunks.matmul_dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = torch.mm(grad, chunks.weight)
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), chunks.hidden_of(rows))
            if grad_low is not None and chunks.up is not None:
                grad_low[rows] = torch.mm(grad, chunks.up)
            if grad_up is not None and chunks.low is not None:
                _add_product(grad_up, grad.t(), chunks.low[rows])
        # 3. Every rank of a sharded vocabulary has a summand of the gradients of tensors that are equal on all ranks.
        grad_hidden, grad_low = (None if x is None else spec.shard.sum(x) for x in (grad_hidden, grad_low))
        grads = (grad_hidden, grad_weight, grad_bias, grad_low, grad_up)
        rounded = [None if grad is None else grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)]
        return (*rounded, None, None)  # type: ignore[return-value]


_Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Per token, over this rank's rows of the vocabulary: log-sum-exp ``[n]``, entropy ``[n]`` (0 if not requested), logits of
the targets ``[n, K]``, the largest logits ``[n, k]`` and their columns ``[n, k]``."""


def _statistics(z: Tensor, chunks: _Chunks, rows: slice, local: Tensor) -> _Statistics:
    """Return the statistics of a chunk's logits ``z`` ``[n, V]``."""
    spec = chunks.spec
    # Read from the logits what is needed of them: their buffer is overwritten below.
    picked = z.gather(1, local)
    best, best_ids = _largest(z, spec.topk) if spec.topk else (z[:, :0].clone(), local[:, :0])
    # Subtract the maximum, so that exp() cannot overflow.
    top = z.amax(1, keepdim=True)
    z = torch.sub(z, top, out=chunks.buffer("logits", rows))
    if not spec.entropy:
        log_sum = z.exp_().sum(1).log_()
        return log_sum + top.squeeze(1), torch.zeros_like(log_sum), picked, best, best_ids
    # H = log(sum(e^z)) - sum(z e^z) / sum(e^z), for shifted logits z.
    weights = torch.exp(z, out=chunks.buffer("probs", rows))
    total = weights.sum(1)
    log_sum = total.log()
    entropy = log_sum - weights.mul_(z).sum(1).div_(total)
    return log_sum + top.squeeze(1), entropy, picked, best, best_ids


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
        empty = chunks.hidden.new_empty(0, dtype=chunks.stats_dtype)
        best = empty.new_empty(0, chunks.spec.topk)
        return empty, empty, empty.new_empty(0, n_targets), best, best.long()
    lse, entropy, picked, best, best_ids = (torch.cat(tensors) for tensors in zip(*stats, strict=True))
    return lse, entropy, picked, best, best_ids


def _output_gradients(
    shard: VocabShard,
    logprobs: tuple[Tensor | None, Tensor | None],
    topk: tuple[Tensor | None, Tensor | None],
    entropy: Tensor | None,
    lse: Tensor,
) -> _Gradients:
    """Combine the gradients of the outputs. For the backward, the most likely tokens are additional targets."""
    # Start with zero columns, so that cat() works if neither log-probs nor top-k received a gradient.
    picked, ids = [lse.new_empty(lse.shape[0], 0)], [lse.new_empty(lse.shape[0], 0, dtype=torch.int64)]
    for grad, tokens in (logprobs, topk):
        if grad is not None and tokens is not None:
            picked.append(grad.masked_fill(tokens == IGNORE_INDEX, 0.0))
            ids.append(tokens)
    local, is_local = shard.localize(torch.cat(ids, dim=1))
    return _Gradients(picked=torch.cat(picked, dim=1), entropy=entropy, ids=local, is_local=is_local)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``total += a @ b``, where the product may have a narrower dtype than the total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b))
