"""torchtitan's Qwen3, chunked loss and gradient clipping on the CPU.

Its trainer and its attention for packed documents need a GPU. The loop is written here like its trainer's, and attention
runs separately for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter, _build_qwen3_layers, _qwen3_norm
from torchtitan.protocols.module import Module
from transformers import AutoConfig

from benchmarks.peers.workload import plain_workload
from benchmarks.rows import Task


class _PerSequence(Module):
    """Attention over each sequence separately; ``attention_masks`` is the list of their lengths."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: list[int], **kwargs: Any) -> Tensor:
        split = (x.transpose(1, 2).split(attention_masks, 2) for x in (q, k, v))
        outs = [
            F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
            for a, b, c in zip(*split, strict=True)
        ]
        return torch.cat(outs, 2).transpose(1, 2)


def _model(folder: str, length: int) -> Qwen3Model:
    """Load the model of a Hugging Face directory."""
    config = AutoConfig.from_pretrained(folder)
    layers = _build_qwen3_layers(
        n_layers=config.num_hidden_layers,
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_dim=config.intermediate_size,
        attn_backend="varlen",
        rope=CosSinRoPE.Config(dim=config.head_dim, max_seq_len=length, theta=config.rope_parameters["rope_theta"]),
    )
    for layer in layers:
        layer.attention.inner_attention = _PerSequence.Config()
    titan = Qwen3Model.Config(
        dim=config.hidden_size,
        vocab_size=config.vocab_size,
        norm=_qwen3_norm(config.hidden_size),
        enable_weight_tying=False,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.hidden_size),
        lm_head=Linear.Config(in_features=config.hidden_size, out_features=config.vocab_size),
        layers=layers,
    )
    model = titan.build()
    weights = Qwen3StateDictAdapter(titan, folder).from_hf(load_file(Path(folder) / "model.safetensors"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or any("rope" not in name for name in missing):
        raise ValueError(f"model = {folder!r}: torchtitan misses {missing} and does not know {unexpected}")
    return model


class TitanRow:
    """The model with its loss and optimizer."""

    can_forward = False

    def __init__(self, task: Task) -> None:
        workload = plain_workload(task)
        self.clip = task.clip
        wrapper = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=workload.vocabulary))
        self.loss = wrapper.build()
        # The loss takes chunks of equal length: padding is added, as a separate sequence.
        padding = -workload.tokens % wrapper.num_chunks
        self.lengths = [*workload.lengths, padding] if padding else workload.lengths
        self.ids = F.pad(torch.cat(workload.input_ids), (0, padding))[None]
        self.positions = torch.cat([torch.arange(n) for n in self.lengths])[None]
        self.labels = self.ids.roll(-1, 1)
        self.labels[0, torch.tensor(workload.lengths).cumsum(0) - 1] = IGNORE_INDEX
        self.labels[0, workload.tokens :] = IGNORE_INDEX
        self.trained = torch.tensor(workload.trained_tokens)
        self.model = _model(task.model, max(workload.lengths))
        self.loss.set_lm_head(self.model.lm_head)
        self.model._skip_lm_head = True
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.lr, weight_decay=task.weight_decay, fused=True
        )

    def step(self) -> tuple[float, float]:
        """See :class:`benchmarks.rows.Row`."""
        self.optimizer.zero_grad()
        hidden = self.model(self.ids, positions=self.positions, attention_masks=self.lengths)
        loss, _ = self.loss(hidden, self.labels, self.trained)
        loss.backward()
        norm = clip_grad_norm_(list(self.model.parameters()), self.clip, foreach=True)
        self.optimizer.step()
        return loss.item(), norm.item()

    def forward(self) -> list[Tensor]:
        """Not measured here."""
        raise NotImplementedError("the row of torchtitan takes steps alone")


def build(task: Task) -> TitanRow:
    """Build a row of this module."""
    return TitanRow(task)
