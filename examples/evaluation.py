"""Evaluation on held-out problems: loss, and accuracy of generated answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from chat import ChatFormat
from plain import write_answers
from report import Report
from tasks import Task
from torch import Tensor
from transformers import PreTrainedModel

from areal import TrainEngine
from areal.api import LossFn


def held_out_loss(engine: TrainEngine, samples: Sequence[dict[str, Tensor]], loss_fn: LossFn) -> float:
    """Return the loss per answer token over all ``samples``. Each data-parallel rank evaluates a slice; the result is equal on all ranks."""
    return engine.eval_batch(samples[engine.dp_rank :: engine.dp_size], loss_fn).loss


def accuracy(
    model: PreTrainedModel, chat: ChatFormat, task: Task, max_new_tokens: int, batch_size: int, report: Report
) -> float:
    """Return the fraction of held-out problems that a model answers right with greedy decoding. Equal on all ranks.

    Every rank has a complete model and answers a slice of the problems.
    """
    mine = task.held_out[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros((), dtype=torch.int64, device=model.device)
    written: list[str] = []
    with report.progress("answer", -(-len(mine) // batch_size)) as advance:
        for answers in write_answers(model, chat, mine, max_new_tokens, batch_size):
            written += answers
            problem = mine[len(written) - 1]
            advance(f"{problem.question!r} -> {answers[-1]!r} (right: {problem.answer!r})")
    right += sum(task.is_right(answer, problem) for answer, problem in zip(written, mine, strict=True))
    dist.all_reduce(right)
    return right.item() / len(task.held_out)
