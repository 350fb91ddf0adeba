"""Plain training loops on torch and a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from benchmarks.rows import Task
from benchmarks.workloads import Workload

CHUNK = 256
"""Positions whose logits the hand-written loop keeps in memory at a time."""


def in_order(workload: Workload, rows: int) -> list[list[int]]:
    """Cut into micro-batches of ``rows`` sequences, in order."""
    numbers = range(len(workload.lengths))
    return [list(numbers[start : start + rows]) for start in range(0, len(numbers), rows)]


def first_fit(workload: Workload) -> list[list[int]]:
    """Cut into micro-batches within the token budget: longest sequence first, into the first micro-batch with room."""
    bins: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(workload.lengths)), key=lambda i: -workload.lengths[i]):
        length = workload.lengths[i]
        at = next((b for b, (used, _) in enumerate(bins) if used + length <= workload.max_tokens_per_mb), None)
        if at is None:
            bins.append((length, [i]))
        else:
            bins[at] = (bins[at][0] + length, [*bins[at][1], i])
    return [numbers for _, numbers in bins]


# ---- log-probs of a micro-batch, [T]: all its sequences concatenated, arbitrary at the last position of each


def padded(model: PreTrainedModel, batch: Workload) -> Tensor:
    """Use right padding and logits of every position."""
    ids = pad_sequence(list(batch.input_ids), batch_first=True)
    mask = pad_sequence([torch.ones_like(x) for x in batch.input_ids], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logprobs = -F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten(), reduction="none")
    return logprobs[mask.flatten().bool()]


def stock(model: PreTrainedModel, batch: Workload) -> Tensor:
    """Use one row of all sequences; transformers derives the sequences from the positions, and builds a mask of ``T x T``."""
    ids = torch.cat(batch.input_ids)
    positions = torch.cat([torch.arange(n) for n in batch.lengths])
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return -F.cross_entropy(logits.float(), ids.roll(-1), reduction="none")


def packed(model: PreTrainedModel, batch: Workload, only_trained: bool = False) -> Tensor:
    """Use one row of all sequences, attention per sequence, and logits in chunks that the backward recomputes."""
    ids = torch.cat(batch.input_ids)
    positions = torch.cat([torch.arange(n) for n in batch.lengths])
    lengths = batch.lengths
    body = model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, lengths=lengths)
    hidden, targets = body.last_hidden_state[0], ids.roll(-1)
    trained = torch.cat(batch.trained)
    if only_trained:
        hidden, targets = hidden[trained], targets[trained]

    def head(h: Tensor, t: Tensor) -> Tensor:
        return -F.cross_entropy(F.linear(h, model.lm_head.weight).float(), t, reduction="none")

    chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    logprobs = torch.cat([checkpoint(head, h, t, use_reentrant=False) for h, t in chunks])
    return torch.zeros(len(ids)).masked_scatter(trained, logprobs) if only_trained else logprobs


def _per_sequence(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """Attention of packed ``[1, heads, T, width]``, over each of ``kwargs["lengths"]`` separately."""
    lengths = kwargs["lengths"]
    outs = [
        F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
        for a, b, c in zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    ]
    return torch.cat(outs, 2).transpose(1, 2), None


AttentionInterface.register("bench_per_sequence", _per_sequence)


@dataclass(frozen=True)
class Loop:
    """Micro-batching and log-prob function of a plain loop."""

    cut: Callable[[Workload], list[list[int]]]
    logprobs: Callable[[PreTrainedModel, Workload], Tensor]
    attention: str = "sdpa"


LOOPS = {
    "packed": Loop(first_fit, packed, "bench_per_sequence"),
    "packed, trained": Loop(first_fit, partial(packed, only_trained=True), "bench_per_sequence"),
    "padded": Loop(partial(in_order, rows=8), padded),
    "single": Loop(partial(in_order, rows=1), padded),
    "stock": Loop(first_fit, stock),
    "reference": Loop(partial(in_order, rows=1), padded, "eager"),
}
"""Loops by name. The last is for the reference, in float64."""


class PlainRow:
    """A loop with its model and optimizer."""

    can_forward = True

    def __init__(self, task: Task, loop: Loop, dtype: torch.dtype = torch.float32) -> None:
        self.task, self.loop = task, loop
        if task.ranks > 1:
            dist.init_process_group("gloo")
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype, attn_implementation=loop.attention)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.lr, weight_decay=task.weight_decay, fused=True
        )
        self.workload = task.local_workload()
        self.trained_tokens = task.everything().trained_tokens
        self.micro_batches = [(numbers, self.workload.take(numbers)) for numbers in loop.cut(self.workload)]

    def _precision(self) -> AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.task.dtype == "bfloat16")

    def step(self) -> tuple[float, float]:
        """See :class:`benchmarks.rows.Row`. The gradients are all-reduced as one tensor."""
        total = torch.zeros((), dtype=torch.float64)
        for _, batch in self.micro_batches:
            with self._precision():
                logprobs = self.loop.logprobs(self.model, batch)
            loss = -(logprobs * torch.cat(batch.weights)).sum() / self.trained_tokens
            loss.backward()
            total += loss.detach()
        if self.task.ranks > 1:
            dist.all_reduce(total)
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            together = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(together)
            for gradient, summed in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item(), norm.item()

    @torch.no_grad()
    def forward(self) -> list[Tensor]:
        """See :class:`benchmarks.rows.Row`."""
        out: dict[int, Tensor] = {}
        for numbers, batch in self.micro_batches:
            with self._precision():
                logprobs = self.loop.logprobs(self.model, batch)
            out.update(zip(numbers, logprobs.split(batch.lengths), strict=True))
        return [out[i] for i in range(len(out))]


def build(task: Task, loop: str) -> PlainRow:
    """Build a row of this module, by the name of its loop."""
    return PlainRow(task, LOOPS[loop])
