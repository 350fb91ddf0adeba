"""How good a model is on held-out problems: by its loss, and by what the verifier says of the answers it writes."""

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
    """The loss per answer token over all ``samples``, the same on every rank; each takes its data-parallel share."""
    return engine.eval_batch(samples[engine.dp_rank :: engine.dp_size], loss_fn).loss


def accuracy(
    model: PreTrainedModel, chat: ChatFormat, task: Task, max_new_tokens: int, batch_size: int, report: Report
) -> float:
    """The share of held-out problems that a model answers right, decoding greedily. The same on every rank.

    Every rank holds the whole model and writes the answers to its share of the problems.
    """
    share = task.held_out[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros((), dtype=torch.int64, device=model.device)
    written: list[str] = []
    with report.progress("answer", -(-len(share) // batch_size)) as advance:
        for answers in write_answers(model, chat, share, max_new_tokens, batch_size):
            written += answers
            problem = share[len(written) - 1]
            advance(f"{problem.question!r} -> {answers[-1]!r} (right: {problem.answer!r})")
    right += sum(task.is_right(answer, problem) for answer, problem in zip(written, share, strict=True))
    dist.all_reduce(right)
    return right.item() / len(task.held_out)
