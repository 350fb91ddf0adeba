"""What every row has to compute: three steps of a plain loop in float64, one sequence at a time."""

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
"""Optimizer steps that are compared."""

LOSSES: dict[DType, float] = {"float32": 2e-5, "bfloat16": 5e-3}
"""Largest difference of a loss, relative to the mean size of the terms that it sums: advantages of both signs leave a loss near 0. A number in
bfloat16 has 8 bits, and one rounding is 4e-3 of it."""

NORMS: dict[DType, float] = {"float32": 1e-4, "bfloat16": 5e-3}
"""Largest relative difference of a gradient norm. On the CPU torch adds up the squares of a float32 tensor one by one, which leaves the norm of
a matrix of two million entries too small by up to 1e-4, however exact the gradient is."""

LOGPROBS: dict[DType, float] = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference of a log-prob, in nats."""


@dataclass(frozen=True)
class Reference:
    """The exact numbers.

    Attributes:
        losses, grad_norms: of the first steps; norms are before clipping.
        scale: the sum of ``|weight * logprob|`` over the trained tokens, at the first weights.
        logprobs: float64 ``[trained_tokens]``, of all sequences in turn, at the first weights.
    """

    losses: list[float]
    grad_norms: list[float]
    scale: float
    logprobs: Tensor

    def wrong_step(self, losses: Sequence[float], grad_norms: Sequence[float], dtype: DType) -> str | None:
        """What is wrong with a row's first steps, or ``None``."""
        for i in range(STEPS):
            pairs = (
                ("loss", losses[i], self.losses[i], LOSSES[dtype] * self.scale),
                ("grad norm", grad_norms[i], self.grad_norms[i], NORMS[dtype] * self.grad_norms[i]),
            )
            for name, found, expected, bound in pairs:
                if not abs(found - expected) <= bound:  # not a number is wrong too
                    return f"{name} of step {i + 1} is {found:.8g} instead of {expected:.8g}"
        return None

    def wrong_forward(self, logprobs: Tensor, dtype: DType) -> str | None:
        """What is wrong with a row's log-probs ``[trained_tokens]`` at the first weights, or ``None``."""
        if logprobs.shape != self.logprobs.shape:
            return f"{list(logprobs.shape)} log-probs instead of {list(self.logprobs.shape)}"
        error = (logprobs.double() - self.logprobs).abs().max().item()
        return None if error <= LOGPROBS[dtype] else f"a log-prob is off by {error:.2g}"


def reference(task: Task, cache: Path) -> Reference:
    """The reference of a task, from a file in ``cache`` where it was computed before. Takes minutes otherwise, for much data."""
    path = cache / f"reference-{_digest(task)}.pt"
    if not path.exists():
        computed = _compute(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(computed), path)
    return Reference(**torch.load(path))


def _compute(task: Task) -> Reference:
    row = PlainRow(task, LOOPS["reference"], torch.float64)
    logprobs = torch.cat(row.forward())[torch.cat(row.mine.trained)]
    weights = torch.cat(row.mine.weights)[torch.cat(row.mine.trained)]
    steps = [row.step() for _ in range(STEPS)]
    return Reference(
        losses=[loss for loss, _ in steps],
        grad_norms=[norm for _, norm in steps],
        scale=(weights * logprobs).abs().sum().item() / len(logprobs),
        logprobs=logprobs,
    )


def _digest(task: Task) -> str:
    """Of all that the reference depends on: data, weights, optimizer and number of steps."""
    workload = task.everything()
    digest = hashlib.sha256()
    for tensors in (workload.input_ids, workload.weights, workload.trained):
        digest.update(torch.cat(tensors).numpy().tobytes())
    digest.update(json.dumps([workload.lengths, task.lr, task.weight_decay, task.clip, STEPS]).encode())
    digest.update((Path(task.model) / "config.json").read_bytes())
    digest.update((Path(task.model) / "model.safetensors").read_bytes())
    return digest.hexdigest()[:16]
