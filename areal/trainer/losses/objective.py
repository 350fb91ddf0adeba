"""An objective: what an engine's verbs take together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from areal.api import Batch, LossFn, LossTerms, LossWeightFn, Metric, OutputName, TokenOutputs, default_loss_weight

MeanLossFn = Callable[[TokenOutputs, Batch], LossTerms | tuple[LossTerms, dict[str, Metric]]]
"""As a :data:`~areal.api.LossFn`, but it returns the mean over the micro-batch, or one for each term."""


@dataclass(frozen=True)
class Objective:
    """A loss that sums, what a micro-batch weighs, and the outputs that the loss reads.

    ``engine.train_batch(batch, objective.loss_fn, objective.weight_fn, outputs=objective.outputs)``
    """

    loss_fn: LossFn
    weight_fn: LossWeightFn = default_loss_weight
    outputs: tuple[OutputName, ...] = ("logprobs",)


def mean_loss(
    fn: MeanLossFn, weight_fn: LossWeightFn = default_loss_weight, *, outputs: tuple[OutputName, ...] = ("logprobs",)
) -> Objective:
    """An objective from a loss that returns the mean over a micro-batch: the mean times its weight is the sum again.

    ``weight_fn`` must say what ``fn`` divides by; else the cut of the batch shows. An engine never calls the loss of a micro-batch whose
    weights are all 0, so ``fn`` need not guard against dividing by 0; nor does a term of weight 0 count where others have some.

    Args:
        fn: returns the mean (a scalar, or a dict of scalars), and perhaps metrics.
        weight_fn: what ``fn`` divides by: a scalar, or a dict with the same keys.
        outputs: what ``fn`` reads of :class:`~areal.api.TokenOutputs`.

    Raises:
        ValueError: when called, mean and weight do not have the same terms.
    """

    def loss_fn(token_outputs: TokenOutputs, batch: Batch) -> LossTerms | tuple[LossTerms, dict[str, Metric]]:
        returned = fn(token_outputs, batch)
        means, metrics = returned if isinstance(returned, tuple) else (returned, None)
        sums = _times(means, weight_fn(batch))
        return sums if metrics is None else (sums, metrics)

    return Objective(loss_fn, weight_fn, outputs)


def _times(means: LossTerms, weights: LossTerms) -> LossTerms:
    if isinstance(means, Tensor) and isinstance(weights, Tensor):
        return means * weights
    if isinstance(means, dict) and isinstance(weights, dict) and means.keys() == weights.keys():
        return {name: mean * weights[name] for name, mean in means.items()}
    terms = [sorted(x) if isinstance(x, dict) else "a scalar" for x in (means, weights)]
    raise ValueError(
        f"mean_loss: the loss returned {terms[0]} and its weight {terms[1]}: return the same terms from both"
    )
