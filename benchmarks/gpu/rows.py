"""Training steps that are compared on a device: this library, and plain transformers on the same packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from areal import FinetuneSpec, FSDPConfig, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import Batch, TokenOutputs
from areal.engine.attention.kernels import Segments, packed_attention

LR = 1e-5
CHUNK = 1024
"""Positions whose logits the plain loop keeps in memory at a time."""


def nll(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Cross-entropy, summed over the micro-batch."""
    if outputs.logprobs is None:
        raise ValueError("the engine gave no logprobs")
    return -outputs.logprobs.sum()


@contextmanager
def ours(path: str, sequences: Sequence[Tensor], *, recompute: bool, compiled: bool) -> Iterator[Callable[[], object]]:
    """Build ``train_batch`` of ``fsdp:d1``: bfloat16 compute, float32 master weights, AdamW with bfloat16 moments."""
    config = TrainEngineConfig(
        path=path,
        init_from_scratch=True,
        dtype="bfloat16",
        optimizer=OptimizerConfig(lr=LR),
        activation_checkpointing="full" if recompute else "none",
        fsdp=FSDPConfig(compile=compiled, optimizer_state_dtype="bfloat16"),
    )
    batch = [{"input_ids": ids} for ids in sequences]
    with create_engine(config) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=1_000_000))
        yield lambda: engine.train_batch(batch, nll)


def _packed(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, **kwargs
) -> tuple[Tensor, None]:
    """Attention of packed ``[1, heads, T, width]`` with this library's kernel (flash-attn, or torch's varlen)."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return packed_attention(q, k, v, kwargs["segments"], scale=scaling)[None], None


AttentionInterface.register("bench_packed", _packed)


@contextmanager
def plain(
    path: str, sequences: Sequence[Tensor], device: torch.device, *, recompute: bool
) -> Iterator[Callable[[], object]]:
    """Build a loop around transformers: bfloat16 weights and moments, varlen attention, cross-entropy in recomputed chunks."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=torch.bfloat16, attn_implementation="bench_packed"
        )
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ids = torch.cat(list(sequences)).to(device)
    lengths = [len(x) for x in sequences]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    segments = Segments.of(lengths, device=device)

    def head(h: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, model.lm_head.weight).float(), t, reduction="sum")

    def step() -> None:
        body = model.model(
            input_ids=ids[None], position_ids=positions, attention_mask=None, use_cache=False, segments=segments
        )
        chunks = zip(body.last_hidden_state[0].split(CHUNK), ids.roll(-1).split(CHUNK), strict=True)
        losses = [checkpoint(head, h, t, use_reentrant=False) for h, t in chunks]
        (torch.stack(losses).sum() / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield step
