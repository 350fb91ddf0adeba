"""Common code of the rows of other libraries."""

from __future__ import annotations

from benchmarks.rows import Task
from benchmarks.workloads import Workload


def peer_workload(task: Task) -> Workload:
    """Return the workload.

    Raises:
        ValueError: it is for several ranks, or another dtype than float32.
    """
    if task.ranks > 1:
        raise ValueError(f"ranks = {task.ranks}: rows of peers run on one rank")
    if task.dtype != "float32":
        raise ValueError(f"dtype = {task.dtype!r}: rows of peers run in float32")
    return task.everything()


def plain_workload(task: Task) -> Workload:
    """Return the workload in one micro-batch with equal token weights: supervised fine-tuning, which every library supports.

    Raises:
        ValueError: the workload has other weights, or see :func:`peer_workload`.
    """
    workload = peer_workload(task)
    if any(weight != 1 for weight in workload.sequence_weights) or any(n != 1 for n in workload.prompt_lengths):
        raise ValueError(f"workload = {workload.name!r} weighs its tokens: rows of peers run on 'ragged'")
    if workload.tokens > workload.max_tokens_per_mb:
        raise ValueError(
            f"workload = {workload.name!r} has {workload.tokens} tokens: more than its micro-batch; take 'ragged'"
        )
    return workload
