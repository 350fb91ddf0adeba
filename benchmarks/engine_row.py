"""Engines of this library as rows, used as in user code."""

from __future__ import annotations

import torch
from torch import Tensor

from areal import FinetuneSpec, MicroBatchSpec, OptimizerConfig, TrainEngineConfig, create_engine
from areal.api import Batch, TokenOutputs
from benchmarks.rows import Task


def weighted_nll(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Summed loss of a micro-batch."""
    return -(outputs.logprobs * batch["weights"]).sum()


def trained_tokens(batch: Batch) -> Tensor:
    """Weight of a micro-batch: its response tokens, independently of their advantage."""
    return batch["output_mask"].sum()


class EngineRow:
    """``train_batch`` and ``forward_batch`` of an engine."""

    can_forward = True

    def __init__(self, task: Task, engine: str, share_prefixes: bool) -> None:
        workload = task.local_workload()
        config = TrainEngineConfig(
            path=task.model,
            backend=f"{engine}:d{task.ranks}",
            dtype=task.dtype,
            optimizer=OptimizerConfig(lr=task.lr, weight_decay=task.weight_decay, gradient_clipping=task.clip),
            mb_spec=MicroBatchSpec(max_tokens_per_mb=workload.max_tokens_per_mb, share_prefixes=share_prefixes),
        )
        self.batch = [
            {"input_ids": ids, "weights": weights, "output_mask": trained}
            for ids, weights, trained in zip(workload.input_ids, workload.weights, workload.trained, strict=True)
        ]
        self.engine = create_engine(config)
        self.engine.initialize(FinetuneSpec(total_train_steps=1_000_000))

    def step(self) -> tuple[float, float]:
        """See :class:`benchmarks.rows.Row`."""
        step = self.engine.train_batch(self.batch, weighted_nll, trained_tokens)
        return step.loss, step.grad_norm if step.grad_norm is not None else float("nan")

    def forward(self) -> list[Tensor]:
        """See :class:`benchmarks.rows.Row`."""
        with torch.no_grad():
            return self.engine.forward_batch(self.batch)


def build(task: Task, engine: str = "fsdp", share_prefixes: bool = False) -> EngineRow:
    """Build a row of this module."""
    return EngineRow(task, engine, share_prefixes)
