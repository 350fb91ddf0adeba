"""A third engine, as another package would write it: one process, no sharding, one sequence after another through a plain model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from areal.api import FinetuneSpec, MicroBatch, NamedTensor, Outputs, SaveLoadMeta, TokenOutputs
from areal.api.config import torch_dtype
from areal.engine.base import BaseTrainEngine
from areal.engine.context_parallel import ContextParallel
from areal.engine.optimizer import ClippingOptimizer, torch_optimizer
from areal.engine.parts import EngineParts
from areal.engine.schedule import SequentialSchedule


class PlainWeights:
    """Weights and gradients, which are whole here."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_tensors(self) -> Iterator[NamedTensor]:
        return (NamedTensor(name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def named_gradients(self) -> Iterator[NamedTensor]:
        named = self._model.named_parameters()
        return (NamedTensor(name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in named)


class NoFiles:
    """This engine writes nothing."""

    def save(self, meta: SaveLoadMeta) -> None:
        raise ValueError(f"path = {meta.path}: the plain engine writes no checkpoints; use fsdp")

    load = save

    def wait(self) -> None:
        """Nothing is under way."""


class InPlace:
    """Everything stays where it is."""

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Nothing moves."""

    onload = offload


class PlainEngine(BaseTrainEngine):
    """Three hooks."""

    layout_letters: ClassVar[frozenset[str]] = frozenset()

    def _build(self, spec: FinetuneSpec) -> EngineParts:
        config, dtype = self.config.optimizer, torch_dtype(self.config.dtype)
        model = AutoModelForCausalLM.from_pretrained(self.config.path, dtype=dtype, attn_implementation="sdpa").train()
        parameters = list(model.parameters())
        optimizer = config and ClippingOptimizer(
            torch_optimizer(parameters, config),
            config,
            spec.total_train_steps,
            global_norm=lambda: torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None),
            scale_grads=lambda factor: torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor),
        )
        return EngineParts(
            model=model,
            schedule=SequentialSchedule(model, before_backward=lambda last: None),
            context_parallel=ContextParallel(None),
            optimizer=optimizer,
            checkpointer=NoFiles(),
            weights=PlainWeights(model),
            memory=InPlace(),
            zero_grad=lambda: model.zero_grad(set_to_none=True),
            vocab_size=model.config.vocab_size,
        )

    def _forward_compute_mb(
        self, model: nn.Module, mb: MicroBatch, *, outputs: Outputs, hidden: Tensor | None = None
    ) -> Any:
        rows = [model(ids[None], use_cache=False).logits[0] for ids in mb.data["input_ids"].split(list(mb.seqlens))]
        log_probs = (torch.cat(rows) / self.config.temperature).log_softmax(-1)
        targets = mb.data["target_ids"]
        picked = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        return TokenOutputs(
            logprobs=picked.masked_fill(targets < 0, 0.0), entropy=-(log_probs.exp() * log_probs).sum(-1)
        )

    def _finalize_grads(self) -> None:
        """Nothing is owed."""
