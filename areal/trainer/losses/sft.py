"""Weighted cross-entropy, the objective of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.trainer.losses.aggregate import Aggregation, TokenMean, loss_mask
from areal.trainer.losses.inputs import required_output
from areal.trainer.losses.masked import at_trained, token_count, token_mean
from areal.trainer.losses.objective import Objective


def cross_entropy_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return ``-log p(target)`` in nats, unweighted: ``[T]``, 0 where the mask is 0.

    Args:
        logprobs: ``[T]``. Log-probs of the targets.
        mask: ``[T]``. Only whether it is 0 matters here; aggregations apply its weights.
    """
    return -at_trained(logprobs, mask)


def sft_objective(aggregation: Aggregation | None = None) -> Objective:
    """Return the cross-entropy weighted by ``loss_mask`` (weights of at least 0), or of every target if the batch lacks a mask.

    Metrics: ``sft/nll``, the unweighted mean over trained tokens in nats; ``sft/tokens``, their number.

    Args:
        aggregation: default :class:`TokenMean`, ``sum(w * nll) / sum(w)``.
    """
    aggregate = aggregation or TokenMean()

    def loss_fn(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        mask = loss_mask(batch)
        nll = cross_entropy_loss(required_output(outputs, "logprobs"), mask)
        # The metric is unweighted, so that runs with different weights can be compared.
        metrics = {"sft/nll": token_mean(nll, mask), "sft/tokens": token_count(mask)}
        return aggregate.total(nll, batch), metrics

    return Objective(loss_fn, aggregate.weight)
