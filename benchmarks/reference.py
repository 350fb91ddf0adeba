"""Expected results of every row: three steps of a plain loop in float64, one sequence at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.loops import LOOPS, PlainRow
from benchmarks.rows import DType, Task

STEPS = 3
"""Number of optimizer steps that are compared."""

LOSSES: dict[DType, float] = {"float32": 2e-5, "bfloat16": 5e-3}
"""Largest difference of a loss, relative to the mean size of its terms: advantages of both signs give a loss near 0. A number in
bfloat16 has 8 bits, and one rounding is 4e-3 of it.
"""

NORMS: dict[DType, float] = {"float32": 1e-4, "bfloat16": 5e-3}
"""Largest relative difference of a gradient norm. On the CPU torch adds the squares of a float32 tensor sequentially, which makes
the norm of a matrix of two million entries up to 1e-4 too small, however exact the gradient is.
"""

LOGPROBS: dict[DType, float] = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference of a log-prob, in nats."""


@dataclass(frozen=True)
class Reference:
    """Exact results.

    Attributes:
        losses: losses of the first steps.
        grad_norms: gradient norms of the first steps, before clipping.
        scale: sum of ``|weight * logprob|`` over the trained tokens, at the initial weights.
        logprobs: float64 ``[trained_tokens]``, of all sequences in order, at the initial weights.
    """

    losses: list[float]
    grad_norms: list[float]
    scale: float
    logprobs: Tensor

    def wrong_step(self, losses: Sequence[float], grad_norms: Sequence[float], dtype: DType) -> str | None:
        """Describe the error in a row's first steps; ``None`` if they are correct."""
        for i in range(STEPS):
            pairs = (
                ("loss", losses[i], self.losses[i], LOSSES[dtype] * self.scale),
                ("grad norm", grad_norms[i], self.grad_norms[i], NORMS[dtype] * self.grad_norms[i]),
            )
            for name, actual, expected, bound in pairs:
                if not abs(actual - expected) <= bound:  # NaN is wrong too
                    return f"{name} of step {i + 1} is {actual:.8g} instead of {expected:.8g}"
        return None

    def wrong_forward(self, logprobs: Tensor, dtype: DType) -> str | None:
        """Describe the error in a row's log-probs ``[trained_tokens]`` at the initial weights; ``None`` if they are correct."""
        if logprobs.shape != self.logprobs.shape:
            return f"{list(logprobs.shape)} log-probs instead of {list(self.logprobs.shape)}"
        error = (logprobs.double() - self.logprobs).abs().max().item()
        return None if error <= LOGPROBS[dtype] else f"a log-prob is off by {error:.2g}"


def reference(task: Task, cache: Path) -> Reference:
    """Return the reference of a task, from ``cache`` if it was computed before.

    Takes minutes otherwise, for much data.
    """
    path = cache / f"reference-{_digest(task)}.pt"
    if not path.exists():
        computed = _compute(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(computed), path)
    return Reference(**torch.load(path))


def _compute(task: Task) -> Reference:
    row = PlainRow(task, LOOPS["reference"], torch.float64)
    logprobs = torch.cat(row.forward())[torch.cat(row.workload.trained)]
    weights = torch.cat(row.workload.weights)[torch.cat(row.workload.trained)]
    steps = [row.step() for _ in range(STEPS)]
    return Reference(
        losses=[loss for loss, _ in steps],
        grad_norms=[norm for _, norm in steps],
        scale=(weights * logprobs).abs().sum().item() / len(logprobs),
        logprobs=logprobs,
    )


def _digest(task: Task) -> str:
    """Digest of all inputs of the reference: data, weights, optimizer and number of steps."""
    workload = task.everything()
    digest = hashlib.sha256()
    for tensors in (workload.input_ids, workload.weights, workload.trained):
        digest.update(torch.cat(tensors).numpy().tobytes())
    digest.update(json.dumps([workload.lengths, task.lr, task.weight_decay, task.clip, STEPS]).encode())
    digest.update((Path(task.model) / "config.json").read_bytes())
    digest.update((Path(task.model) / "model.safetensors").read_bytes())
    return digest.hexdigest()[:16]
