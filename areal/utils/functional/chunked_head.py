"""A language-model head whose logits are made a chunk of tokens at a time.

Forward keeps what is per token (log-sum-exp, entropy, the ids of the most likely tokens) and the logits of as many chunks as fit
a bound; backward makes those of the others again, and turns each chunk's into gradients. With ``p = softmax(z)``, ``H`` its entropy and ``y`` a
chosen token,

    d log p_y / d z_j = [j = y] - p_j
    d H       / d z_j = -p_j (log p_j + H)

A chunk whose logits are made again costs four matrix products instead of three.
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
    """How logits come from hidden states, and what is wanted of them.

    Attributes:
        temperature: a number, or ``[T]``.
        logit_scale: what the model multiplies its logits by.
        softcap: what the model bounds them by, or ``None``.
        fp32: multiply in float32 (or wider).
        entropy: whether the entropy is wanted.
        topk: how many of the most likely tokens are wanted; 0 for none.
        chunk_size: tokens whose logits are made at a time.
        keep_bytes: of logits that stay for the backward.
        shard: which rows of the vocabulary are here.
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
        """The dtype of the matrix products, and that of everything made of logits (float32, or float64)."""
        compute = torch.promote_types(hidden.dtype, weight.dtype)
        stats = torch.promote_types(compute, torch.float32)
        return (stats if self.fp32 else compute), stats


class _Chunks:
    """The logits of ``hidden`` ``[T, H]``, chunk by chunk, in buffers that are used again for every chunk.

    Args:
        kept: logits of the first chunks, which are not made again, nor written into.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: HeadSpec, kept: Sequence[Tensor] = ()
    ) -> None:
        self.compute, self.stats = spec.dtypes(hidden, weight)
        self.hidden = hidden
        self.weight = weight.to(self.compute)
        self.bias = None if bias is None else bias.to(self.compute)
        self.spec = spec
        self.kept = list(kept)
        self._buffers: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[slice]:
        tokens, size = self.hidden.shape[0], self.spec.chunk_size
        return (slice(i, min(i + size, tokens)) for i in range(0, tokens, size))

    def buffer(self, name: str, rows: slice) -> Tensor:
        """``[rows, V]`` to write into; a new page is dearer than the pass that fills it."""
        if name not in self._buffers:
            size = min(self.spec.chunk_size, self.hidden.shape[0])
            self._buffers[name] = self.hidden.new_empty(size, self.weight.shape[0], dtype=self.stats)
        return self._buffers[name][: rows.stop - rows.start]

    def hidden_of(self, rows: slice) -> Tensor:
        return self.hidden[rows].to(self.compute)

    def per_token(self, value: float | Tensor, rows: slice) -> float | Tensor:
        return value[rows].to(self.stats).unsqueeze(1) if isinstance(value, Tensor) else value

    def factor(self, rows: slice) -> float | Tensor:
        """What the logits' slope owes to the scale and the temperature: a number, or ``[rows, 1]``."""
        return self.spec.logit_scale / self.per_token(self.spec.temperature, rows)

    def made(self, rows: slice) -> Tensor:
        """The logits ``[rows, V]`` of the next chunk, which are kept if those of one more chunk fit."""
        buffer = self.buffer("logits", rows)
        if (len(self.kept) + 1) * self._buffers["logits"].nbytes > self.spec.keep_bytes:
            return self._write(rows, buffer)
        self.kept.append(self._write(rows, torch.empty_like(buffer)))
        return self.kept[-1]

    def logits(self, rows: slice) -> Tensor:
        """``[rows, V]``: those that were kept, or made again."""
        chunk = rows.start // self.spec.chunk_size
        return self.kept[chunk] if chunk < len(self.kept) else self._write(rows, self.buffer("logits", rows))

    def _write(self, rows: slice, z: Tensor) -> Tensor:
        """Logits after scale, softcap and temperature, to ``z``."""
        h, w = self.hidden_of(rows), self.weight.t()
        out = z if self.compute == self.stats else None
        product = torch.mm(h, w, out=out) if self.bias is None else torch.addmm(self.bias, h, w, out=out)
        if out is None:
            z.copy_(product)
        cap = self.spec.softcap
        if cap is not None:
            z.mul_(self.spec.logit_scale / cap).tanh_().mul_(cap / self.per_token(self.spec.temperature, rows))
            return z
        factor = self.factor(rows)
        return z if isinstance(factor, float) and factor == 1.0 else z.mul_(factor)

    def softcap_slope(self, z: Tensor, rows: slice) -> Tensor | None:
        """``1 - tanh^2`` at ``z`` ``[rows, V]``, or ``None`` without a softcap."""
        cap = self.spec.softcap
        if cap is None:
            return None
        slope = torch.mul(z, self.per_token(self.spec.temperature, rows) / cap, out=self.buffer("slope", rows))
        return slope.square_().neg_().add_(1.0)


@dataclass
class _Gradients:
    """What arrives at the outputs, in the terms of the chain rule above.

    Attributes:
        picked: ``[T, K]``, of the log-probs of ``ids``; 0 where there is no target.
        entropy: ``[T]``, or ``None``.
        ids: ``[T, K]``, this rank's columns of the chosen tokens.
        mine: ``[T, K]``, whether this rank holds them.
    """

    picked: Tensor
    entropy: Tensor | None
    ids: Tensor
    mine: Tensor

    def to_logits(self, chunks: _Chunks, rows: slice, lse: Tensor, entropy: Tensor | None) -> Tensor:
        """The gradient ``[rows, V]`` of the product of hidden states and weight."""
        z = chunks.logits(rows)
        slope = chunks.softcap_slope(z, rows)
        factor = chunks.factor(rows)
        picked = self.picked[rows] * factor
        pull = picked.sum(1, keepdim=True)
        logp = torch.sub(z, lse[rows].unsqueeze(1), out=chunks.buffer("logits", rows))
        if self.entropy is None or entropy is None:
            grad = logp.exp_().mul_(pull.neg_())
        else:
            p = torch.exp(logp, out=chunks.buffer("probs", rows))
            up = self.entropy[rows].unsqueeze(1) * factor
            grad = logp.mul_(-up).sub_(up * entropy[rows].unsqueeze(1) + pull).mul_(p)
        grad.scatter_add_(1, self.ids[rows], picked * self.mine[rows])
        return grad if slope is None else grad.mul_(slope)


class ChunkedHead(torch.autograd.Function):
    """``(hidden, weight, bias, targets, spec) -> (logprobs, entropy, topk_logprobs, topk_ids)``.

    ``targets`` is int64 ``[T, K]``, or ``None``. Outputs are ``[T, K]``, ``[T]``, ``[T, k]`` and ``[T, k]``, or
    ``None`` where not wanted.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor | None, spec: HeadSpec
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        chunks = _Chunks(hidden, weight, bias, spec)
        wanted = hidden.new_empty(hidden.shape[0], 0, dtype=torch.int64) if targets is None else targets
        local, mine = spec.shard.localize(wanted)
        stats = [_statistics(chunks.made(rows), chunks, rows, local[rows]) for rows in chunks]
        lse, entropy, picked, best, best_ids = _joined(stats, chunks, wanted.shape[1])
        lse, whole_entropy, picked = spec.shard.merge(
            lse, entropy if spec.entropy else None, picked.masked_fill(~mine, 0)
        )
        logprobs, topk_logprobs, topk_ids = None, None, None
        if targets is not None:
            unknown = ((targets < 0) | (targets >= spec.shard.total)) & (targets != IGNORE_INDEX)
            logprobs = (picked - lse.unsqueeze(1)).masked_fill_(targets == IGNORE_INDEX, 0.0)
            logprobs = logprobs.masked_fill_(unknown, float("nan"))
        if spec.topk:
            best, topk_ids = spec.shard.merge_topk(best, best_ids + spec.shard.start)
            topk_logprobs = best - lse.unsqueeze(1)
            ctx.mark_non_differentiable(topk_ids)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, whole_entropy, topk_ids, *chunks.kept)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return logprobs, whole_entropy, topk_logprobs, topk_ids

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_topk: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():  # once_differentiable would let a constant upstream gradient pass, and lose a term
            raise RuntimeError(
                "head_outputs is differentiable once: its backward keeps no graph. Call backward without create_graph=True, "
                "or differentiate areal.utils.functional.logits twice"
            )
        hidden, weight, bias, targets, lse, entropy, topk_ids, *kept = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        incoming = _incoming(spec.shard, (grad_logprobs, targets), (grad_topk, topk_ids), grad_entropy, lse)
        chunks = _Chunks(hidden, weight, bias, spec, kept)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Sums over chunks and ranks are made in the statistics' dtype, then rounded once.
        grad_hidden = torch.zeros_like(hidden, dtype=chunks.stats) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=chunks.stats) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=chunks.stats) if wants_bias else None
        for rows in chunks:
            grad = incoming.to_logits(chunks, rows, lse, entropy)
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0))
            grad = grad.to(chunks.compute)
            if grad_hidden is not None:
                grad_hidden[rows] = torch.mm(grad, chunks.weight)
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), chunks.hidden_of(rows))
        return (
            None if grad_hidden is None else spec.shard.sum(grad_hidden).to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


_Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Per token, over this rank's rows: log-sum-exp ``[n]``, entropy ``[n]`` (0 if not wanted), logits of the targets
``[n, K]``, the largest logits ``[n, k]`` and their columns ``[n, k]``."""


def _statistics(z: Tensor, chunks: _Chunks, rows: slice, local: Tensor) -> _Statistics:
    """Statistics of a chunk's logits ``z`` ``[n, V]``."""
    spec = chunks.spec
    picked = z.gather(1, local)
    best, best_ids = z.topk(spec.topk, dim=1) if spec.topk else (z[:, :0].clone(), local[:, :0])
    top = z.amax(1, keepdim=True)
    z = torch.sub(z, top, out=chunks.buffer("logits", rows))
    if not spec.entropy:
        log_mass = z.exp_().sum(1).log_()
        return log_mass + top.squeeze(1), torch.zeros_like(log_mass), picked, best, best_ids
    p = torch.exp(z, out=chunks.buffer("probs", rows))
    mass = p.sum(1)
    log_mass = mass.log()
    entropy = log_mass - p.mul_(z).sum(1).div_(mass)
    return log_mass + top.squeeze(1), entropy, picked, best, best_ids


def _joined(stats: list[_Statistics], chunks: _Chunks, n_targets: int) -> _Statistics:
    """The statistics of all chunks, end to end; of no token where there is none."""
    if not stats:
        none = chunks.hidden.new_empty(0, dtype=chunks.stats)
        best = none.new_empty(0, chunks.spec.topk)
        return none, none, none.new_empty(0, n_targets), best, best.long()
    lse, entropy, picked, best, best_ids = (torch.cat(parts) for parts in zip(*stats, strict=True))
    return lse, entropy, picked, best, best_ids


def _incoming(
    shard: VocabShard,
    logprobs: tuple[Tensor | None, Tensor | None],
    topk: tuple[Tensor | None, Tensor | None],
    entropy: Tensor | None,
    lse: Tensor,
) -> _Gradients:
    """Gather what arrived. The most likely tokens are targets like any other, once they are known."""
    picked, ids = [lse.new_empty(lse.shape[0], 0)], [lse.new_empty(lse.shape[0], 0, dtype=torch.int64)]
    for grad, tokens in (logprobs, topk):
        if grad is not None and tokens is not None:
            picked.append(grad.masked_fill(tokens == IGNORE_INDEX, 0.0))
            ids.append(tokens)
    local, mine = shard.localize(torch.cat(ids, dim=1))
    return _Gradients(picked=torch.cat(picked, dim=1), entropy=entropy, ids=local, mine=mine)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, where the product may be of a narrower dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b))
