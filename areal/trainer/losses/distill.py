"""Distillation from a teacher's probabilities of ``K`` tokens at each position.

The ``K`` tokens are ``target_ids`` ``[T, K]``, distinct at each position, with -100 where there are fewer; the engine's log-probs are then
``[T, K]`` too. ``K`` tokens are not a distribution: all others are one more outcome, the rest, with what is left of the probability on both
sides. The divergence over these ``K + 1`` outcomes is at least 0, at most that over the vocabulary, and equal to it when ``K`` covers it.
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
    """A per-token loss ``[T]``, and the probability of the ``K`` tokens under each model, ``[T]``, without a gradient."""

    per_token: Tensor
    teacher_mass: Tensor
    student_mass: Tensor


def forward_kl_loss(
    logprobs: Tensor, teacher_logprobs: Tensor, target_ids: Tensor, mask: Tensor, *, rest: bool = True
) -> DistillLoss:
    """``sum_k q_k (log q_k - log p_k)`` with teacher ``q`` and student ``p``: KL(teacher || student), which covers all that the teacher does.

    Args:
        logprobs: the student's, ``[T, K]``. teacher_logprobs: ``[T, K]``, ``-inf`` for a probability of 0.
        target_ids: int64 ``[T, K]``; a token below 0 does not count. mask: ``[T]``; 0 gives a loss of 0.
        rest: count what is left as one more outcome. Without it the sum is over the ``K`` tokens only: cross-entropy with the teacher's
            probabilities, up to a constant, and no divergence: it may be negative.
    """
    p, q = _outcomes(logprobs, teacher_logprobs, target_ids, mask, rest=rest)
    return DistillLoss(_divergence(q, p), *_masses(p, q, target_ids))


def reverse_kl_loss(logprobs: Tensor, teacher_logprobs: Tensor, target_ids: Tensor, mask: Tensor) -> DistillLoss:
    """``sum_k p_k (log p_k - log q_k)`` with teacher ``q`` and student ``p``: KL(student || teacher), which stays within
    what the teacher does.

    Always with the rest as one more outcome: over ``K`` tokens alone it would be least where the student gives them no probability. It is not
    defined where the teacher gives a token a probability of 0 and the student does not: the loss is then infinite.

    Args:
        logprobs: the student's, ``[T, K]``. teacher_logprobs: ``[T, K]``, finite.
        target_ids: int64 ``[T, K]``; a token below 0 does not count. mask: ``[T]``; 0 gives a loss of 0.
    """
    p, q = _outcomes(logprobs, teacher_logprobs, target_ids, mask, rest=True)
    return DistillLoss(_divergence(p, q), *_masses(p, q, target_ids))


def _outcomes(
    logprobs: Tensor, teacher_logprobs: Tensor, target_ids: Tensor, mask: Tensor, *, rest: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs of student and teacher ``[T, K]``, or ``[T, K + 1]`` with the rest; ``-inf`` for what does not count."""
    unused = (target_ids < 0) | (mask == 0)[:, None]
    found = []
    for x in (logprobs, teacher_logprobs.detach()):
        logs = to_compute_dtype(x).masked_fill(unused, -torch.inf)
        if rest:
            # Bounded from below by the rounding of the sum, without a gradient there: nothing is left when K covers the vocabulary.
            left = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logs.dtype).eps)
            logs = torch.cat([logs, left.log()], -1)
        found.append(logs)
    return found[0], found[1]


def _divergence(a: Tensor, b: Tensor) -> Tensor:
    """``sum a (log a - log b)`` over the last dimension, from logarithms; outcomes of no probability in ``a`` are filled before arithmetic."""
    nothing = a.detach() == -torch.inf
    a, b = a.masked_fill(nothing, 0.0), b.masked_fill(nothing, 0.0)
    return (a.exp() * (a - b)).sum(-1)


def _masses(p: Tensor, q: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    k = target_ids.shape[-1]
    return q.detach()[:, :k].exp().sum(-1), p.detach()[:, :k].exp().sum(-1)


def distill_objective(
    aggregation: Aggregation | None = None, *, direction: Direction = "forward", rest: bool = True
) -> Objective:
    """KL between teacher and student on ``target_ids`` ``[T, K]``. Needs ``teacher_logprobs`` ``[T, K]``.

    Without ``loss_mask`` every position with a target counts. Metrics, means over trained tokens: ``distill/kl`` in nats,
    ``distill/teacher_mass`` and ``distill/student_mass``, the probability of the ``K`` tokens.

    Args:
        aggregation: :class:`TokenMean` by default.
        direction: ``"forward"``, KL(teacher || student), or ``"reverse"``.
        rest: as :func:`forward_kl_loss`; the reverse direction needs it.

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
        if ids.dim() != 2:
            raise ValueError(
                f"target_ids has shape {tuple(ids.shape)}: distillation needs [T, K], the teacher's tokens"
            )
        teacher = required_like(batch, "teacher_logprobs", logprobs)
        if direction == "forward":
            loss = forward_kl_loss(logprobs, teacher, ids, mask, rest=rest)
        else:
            loss = reverse_kl_loss(logprobs, teacher, ids, mask)
        metrics = {
            "distill/kl": token_mean(loss.per_token, mask),
            "distill/teacher_mass": token_mean(loss.teacher_mass, mask),
            "distill/student_mass": token_mean(loss.student_mass, mask),
        }
        return aggregate.total(loss.per_token, batch), metrics

    return Objective(loss_fn, aggregate.weight)
