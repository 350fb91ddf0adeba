"""Fixtures for the tests of losses: packed tensors with every kind of mask, and an engine's step on given log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from areal.api import Batch, MicroBatchSpec, TokenOutputs
from areal.engine.loss_step import LossStep, LossWeights, local_weights, sum_results
from areal.trainer.losses import Objective
from areal.utils.data import plan_batch

CU = torch.tensor([0, 4, 5, 9, 12, 14], dtype=torch.int32)
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1], dtype=torch.float64)
"""Of the five sequences of ``CU``, the second is one token long and the third is untrained."""


def rows() -> list[tuple[int, int]]:
    """Start and end of each sequence of ``CU``."""
    return list(pairwise(CU.tolist()))


def values(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers of float64."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape or (len(MASK),), generator=generator, dtype=torch.float64) * scale).to(dtype)


def logprobs(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Log-probs around -2; those of two seeds differ by about half a nat."""
    return values(seed, *shape, scale=0.35, dtype=dtype) - 2


def batch_of(**keys: Tensor) -> Batch:
    """The sequences of ``CU`` with ``loss_mask`` and targets, and more keys."""
    targets = torch.where(MASK != 0, 1, -100)
    return Batch({"loss_mask": MASK, "target_ids": targets, **keys}, CU)


LENGTHS = (5, 2, 9, 3, 4, 7, 2, 6)
"""Tokens of :func:`samples`."""


def samples(seed: int = 0, *, k: int | None = None) -> list[dict[str, Tensor]]:
    """Eight sequences with every key that a loss reads, and ``now_*``, the model's outputs; the fourth is untrained."""
    made = []
    for i, n in enumerate(LENGTHS):
        at = 100 * (seed + 1) + 10 * i
        wide = (n,) if k is None else (n, k)
        mask = (values(at, n) > -0.6).double()
        mask[0] = 1.0
        if i == 2:
            mask = mask * 0.5
        if i == 3:
            mask = torch.zeros(n, dtype=torch.float64)
        sample = {
            "input_ids": torch.arange(n) % 7,
            "loss_mask": mask,
            "advantages": values(at + 1, n),
            "returns": values(at + 2, n),
            "old_values": values(at + 3, n),
            "now_values": values(at + 3, n) + values(at + 4, n, scale=0.2),
            "now_entropy": values(at + 5, n).abs(),
            "now_logprobs": -values(at + 6, *wide).abs() - 2,
            "teacher_logprobs": -values(at + 7, *wide).abs() - 2,
            "pair_ids": torch.tensor(i // 2),
            "group_tokens": torch.tensor(0.0, dtype=torch.float64),
        }
        for j, key in enumerate(("old_logprobs", "rollout_logprobs", "ref_logprobs")):
            sample[key] = logprobs(at, n) + values(at + 8 + j, n, scale=0.3)
        if k is None:
            sample["now_logprobs"] = logprobs(at, n)
        else:
            sample["target_ids"] = torch.arange(k).expand(n, k).clone()
        made.append(sample)
    for i in range(0, len(made), 4):  # groups of four; the last position of a sequence is without a target
        group = made[i : i + 4]
        total = sum(s["loss_mask"][: None if k else -1].sum() for s in group)
        for sample in group:
            sample["group_tokens"] = torch.as_tensor(total)
    return made


@dataclass(frozen=True)
class Step:
    """Result of a step: the loss divided by its weight, metrics, and gradients by output, one tensor for each sample."""

    loss: float
    weight: float
    metrics: dict[str, float]
    gradients: dict[str, list[Tensor]]


def step(objective: Objective, batch: list[dict[str, Tensor]], *, n_mbs: int = 1, granularity: int = 1) -> Step:
    """An engine's step, with its own packing, weights, division and reduction of metrics, on outputs that the batch has as ``now_*``."""
    spec = MicroBatchSpec(n_mbs=n_mbs, granularity=granularity)
    mbs = plan_batch(batch, spec).build(n_mbs=n_mbs, device=torch.device("cpu"))
    plain, per_mb = local_weights(mbs, objective.weight_fn)
    total = {name: sum(weights[name] for weights in per_mb.values()) for name in per_mb[0]}
    run = LossStep(objective.loss_fn, LossWeights(plain, per_mb, total), total, 1.0)
    results, gradients = [], []
    for mb in mbs.real:
        leaves = {str(name): mb.data[f"now_{name}"].clone().requires_grad_() for name in objective.outputs}
        outputs: Any = TokenOutputs(**leaves)
        loss, result = run(outputs, mb)
        if loss is not None:
            loss.backward()
        results.append(result)
        gradients.append({name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()})
    summary = sum_results(mbs, results)
    loss = sum(summary.terms[name] / total[name] for name in total)
    return Step(loss, sum(total.values()), summary.reduced_metrics(), mbs.restore(gradients))
