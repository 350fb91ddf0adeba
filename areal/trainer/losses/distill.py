"""Distillation from a teacher's log-probs of ``K`` tokens per position.

The ``K`` tokens are ``target_ids`` ``[T, K]``, distinct at each position and filled with -100; the engine's log-probs are then ``[T, K]``.
``K`` tokens are not a distribution. All other tokens form one more outcome, the rest, with the remaining probability. The divergence over
these ``K + 1`` outcomes is at least 0 and at most the divergence over the vocabulary. Both are equal if ``K`` covers the vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.trainer.losses.aggregate import Aggregation, TokenMean, loss_mask
from areal.trainer.losses.inputs import refuse, required_like, required_output
from areal.trainer.losses.masked import to_compute_dtype, token_mean
from areal.trainer.losses.objective import Objective

Direction = Literal["forward", "reverse"]


class DistillLoss(NamedTuple):
    """A per-token loss ``[T]``, and the total probability of the ``K`` tokens under each model, ``[T]``, without a gradient."""

    per_token: Tensor
    teacher_mass: Tensor
    student_mass: Tensor


def forward_kl_loss(
    logprobs: Tensor, teacher_logprobs: Tensor, target_ids: Tensor, mask: Tensor, *, rest: bool = True
) -> DistillLoss:
    """``sum_k q_k (log q_k - log p_k)`` with teacher ``q`` and student ``p``: KL(teacher || student), mode-covering.

    Args:
        logprobs: ``[T, K]``. The student's log-probs.
        teacher_logprobs: ``[T, K]``. ``-inf`` for a probability of 0.
        target_ids: int64 ``[T, K]``. Negative entries are excluded.
        mask: ``[T]``. The loss is 0 where it is 0.
        rest: add the remaining probability as one more outcome. Without it, the sum over ``K`` tokens is a cross-entropy with the teacher's
            probabilities up to a constant. It is no divergence and may be negative.
    """
    p, q = _outcomes(logprobs, teacher_logprobs, target_ids, mask, rest=rest)
    return DistillLoss(_divergence(q, p), *_masses(p, q, target_ids))


def reverse_kl_loss(logprobs: Tensor, teacher_logprobs: Tensor, target_ids: Tensor, mask: Tensor) -> DistillLoss:
    """``sum_k p_k (log p_k - log q_k)`` with teacher ``q`` and student ``p``: KL(student || teacher), mode-seeking.

    The rest is always one more outcome: over ``K`` tokens alone, the minimum would be a student that gives them no probability. The loss is
    infinite where the teacher gives a token probability 0 and the student does not.

    Args:
        logprobs: ``[T, K]``. The student's log-probs.
        teacher_logprobs: ``[T, K]``, finite.
        target_ids: int64 ``[T, K]``. Negative entries are excluded.
        mask: ``[T]``. The loss is 0 where it is 0.
    """
    p, q = _outcomes(logprobs, teacher_logprobs, target_ids, mask, rest=True)
    return DistillLoss(_divergence(p, q), *_masses(p, q, target_ids))


def _outcomes(
    logprobs: Tensor, teacher_logprobs: Tensor, target_ids: Tensor, mask: Tensor, *, rest: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probs of student and teacher: ``[T, K]``, or ``[T, K + 1]`` with the rest; ``-inf`` for excluded tokens."""
    # Excluded tokens have probability 0 under both models: they contribute nothing to sums over the last dimension.
    unused = (target_ids < 0) | (mask == 0)[:, None]
    outcomes = []
    for x in (logprobs, teacher_logprobs.detach()):
        logs = to_compute_dtype(x).masked_fill(unused, -torch.inf)
        if rest:
            # The remaining probability, at least the rounding of the sum: nothing remains when K covers the vocabulary.
            remaining = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logs.dtype).eps)
            logs = torch.cat([logs, remaining.log()], -1)
        outcomes.append(logs)
    return outcomes[0], outcomes[1]


def _divergence(a: Tensor, b: Tensor) -> Tensor:
    """Return ``sum a (log a - log b)`` over the last dimension, from logarithms."""
    # -inf - (-inf) is NaN: outcomes of probability 0 in `a` are filled before the subtraction.
    impossible = a.detach() == -torch.inf
    a, b = a.masked_fill(impossible, 0.0), b.masked_fill(impossible, 0.0)
    return (a.exp() * (a - b)).sum(-1)


def _masses(p: Tensor, q: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of the ``K`` tokens under teacher ``q`` and student ``p``, without the rest."""
    k = target_ids.shape[-1]
    return q.detach()[:, :k].exp().sum(-1), p.detach()[:, :k].exp().sum(-1)


def distill_objective(
    aggregation: Aggregation | None = None, *, direction: Direction = "forward", rest: bool = True
) -> Objective:
    """Return the objective KL between teacher and student on ``target_ids`` ``[T, K]``. Needs ``teacher_logprobs`` ``[T, K]``.

    Without ``loss_mask`` every position with a target is trained. Metrics are means over trained tokens: ``distill/kl`` in nats,
    ``distill/teacher_mass`` and ``distill/student_mass``, the probability of the ``K`` tokens.

    Args:
        aggregation: default :class:`TokenMean`.
        direction: ``"forward"``, KL(teacher || student), or ``"reverse"``.
        rest: see :func:`forward_kl_loss`; must be True for the reverse direction.

    Raises:
        ValueError: an option is out of range. When called: the batch lacks ``teacher_logprobs``, or log-probs are not ``[T, K]``.
    """
    if direction not in ("forward", "reverse"):
        refuse("direction", direction, "choose 'forward' or 'reverse'")
    if direction == "reverse" and not rest:
        refuse("rest", rest, "the reverse direction is no divergence on K tokens alone: keep rest=True")
    aggregate = aggregation or TokenMean()

    def loss_fn(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs, mask, ids = required_output(outputs, "logprobs"), loss_mask(batch), batch["target_ids"]
        # Targets [T] are the default of a batch without distillation.
        if ids.dim() != 2:
            raise ValueError(
                f"target_ids has shape {tuple(ids.shape)}: distillation needs [T, K], the teacher's tokens"
            )
        teacher = required_like(batch, "teacher_logprobs", logprobs)
        if direction == "forward":
            loss = forward_kl_loss(logprobs, teacher, ids, mask, rest=rest)
        else:
            loss = reverse_kl_loss(logprobs, teacher, ids, mask)
        # The masses show how much of both distributions the K tokens cover.
        metrics = {
            "distill/kl": token_mean(loss.per_token, mask),
            "distill/teacher_mass": token_mean(loss.teacher_mass, mask),
            "distill/student_mass": token_mean(loss.student_mass, mask),
        }
        return aggregate.total(loss.per_token, batch), metrics

    return Objective(loss_fn, aggregate.weight)
