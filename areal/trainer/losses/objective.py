"""Objectives: the loss, weight function and outputs that an engine's verb takes; :func:`policy_objective` composes those of RL."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor

from areal.api import Batch, LossFn, LossTerms, LossWeightFn, Metric, OutputName, TokenOutputs, default_loss_weight
from areal.trainer.losses.aggregate import Aggregation, TokenMean
from areal.trainer.losses.inputs import ratio_denominator, refuse, required_like, required_output
from areal.trainer.losses.kl import KLTerm, kl_metrics
from areal.trainer.losses.masked import at_trained, token_max, token_mean
from areal.trainer.losses.mismatch import MismatchCorrection
from areal.trainer.losses.policy import RatioStats, Surrogate

MeanLossFn = Callable[[TokenOutputs, Batch], LossTerms | tuple[LossTerms, dict[str, Metric]]]
"""Like :data:`~areal.api.LossFn`, but returns the mean over the micro-batch, or a mean per term."""


@dataclass(frozen=True)
class Objective:
    """A loss that sums over a micro-batch, its weight function, and the outputs that it reads: ``engine.train_batch(batch, objective)``.

    Attributes:
        loss_fn: returns the sum of the loss over a micro-batch. With a weight function other than the default, a verb refuses it alone.
        weight_fn: returns the denominator of ``loss_fn``.
        outputs: per-token outputs that ``loss_fn`` reads.
        recomputed: batch keys that must be the trainer's own. With the rollout's log-probs in their place, the loss would lose a term.
    """

    loss_fn: LossFn
    weight_fn: LossWeightFn = default_loss_weight
    outputs: tuple[OutputName, ...] = ("logprobs",)
    recomputed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.weight_fn is default_loss_weight:
            return
        # A mark for the engine's verbs. A bound method takes no attributes: its partial does.
        loss_fn: Any = self.loss_fn if isinstance(self.loss_fn, FunctionType) else functools.partial(self.loss_fn)
        loss_fn.needs_weight_fn = True
        object.__setattr__(self, "loss_fn", loss_fn)


def mean_loss(
    fn: MeanLossFn, weight_fn: LossWeightFn = default_loss_weight, *, outputs: tuple[OutputName, ...] = ("logprobs",)
) -> Objective:
    """Return an objective from a loss that is a mean over the micro-batch: mean times weight is the sum.

    ``weight_fn`` must return the denominator of ``fn``. Otherwise the result depends on how the batch is cut into micro-batches. ``fn``
    does not have to guard against division by 0: an engine never calls the loss of a micro-batch whose weights are all 0, and a term of
    weight 0 does not count.

    Args:
        fn: returns the mean (a scalar, or a dict of scalars), and optionally metrics.
        weight_fn: returns the denominator of ``fn``: a scalar, or a dict with the same keys.
        outputs: fields of :class:`~areal.api.TokenOutputs` that ``fn`` reads.

    Raises:
        ValueError: mean and weight do not have the same terms (raised when the loss is called).
    """

    def loss_fn(token_outputs: TokenOutputs, batch: Batch) -> LossTerms | tuple[LossTerms, dict[str, Metric]]:
        # Metrics have weights of their own kind and pass through unchanged.
        returned = fn(token_outputs, batch)
        means, metrics = returned if isinstance(returned, tuple) else (returned, None)
        # The engine divides the sum of these products by the sum of the weights.
        sums = _times(means, weight_fn(batch))
        return sums if metrics is None else (sums, metrics)

    return Objective(loss_fn, weight_fn, outputs)


def _times(means: LossTerms, weights: LossTerms) -> LossTerms:
    """Multiply means with their weights: two scalars, or two dicts with the same keys."""
    if isinstance(means, Tensor) and isinstance(weights, Tensor):
        return means * weights
    if isinstance(means, dict) and isinstance(weights, dict) and means.keys() == weights.keys():
        return {name: mean * weights[name] for name, mean in means.items()}
    terms = [sorted(x) if isinstance(x, dict) else "a scalar" for x in (means, weights)]
    raise ValueError(
        f"mean_loss: the loss returned {terms[0]} and its weight {terms[1]}: return the same terms from both"
    )


def policy_objective(
    surrogate: Surrogate,
    aggregation: Aggregation | None = None,
    *,
    kl: KLTerm | None = None,
    entropy_coef: float = 0.0,
    report_entropy: bool = False,
    correction: MismatchCorrection | None = None,
) -> Objective:
    """Return the objective ``aggregate(w * surrogate + kl - entropy_coef * entropy)``, where every term is a loss per token.

    The batch needs the keys ``loss_mask`` and ``advantages``, the key named by ``surrogate.old``, and those of ``kl`` and ``correction``.

    Metrics are means over trained tokens: ``policy/advantage``; ``policy/entropy``; ``kl_ref/...``; ``mismatch/...``. A surrogate with a
    ratio adds ``policy/ratio``, ``policy/ratio_max`` (a maximum), ``policy/kl_old_k1`` and ``policy/kl_old_k3`` (nats from the policy in the
    denominator). One that clips adds ``policy/clipped_low``, ``policy/clipped_high`` and ``policy/dual_clipped`` (fractions).

    Args:
        surrogate: policy loss with its options.
        aggregation: default :class:`TokenMean`.
        kl: penalty on the distance to a reference.
        entropy_coef: weight of the entropy bonus, in nats.
        report_entropy: report the entropy even if its coefficient is 0.
        correction: importance weights ``w`` between rollout and trainer. They multiply the surrogate only.

    Raises:
        ValueError: an option is out of range, or surrogate and correction both correct for the rollout. When the loss is called: the batch
            lacks a key.
    """
    if not math.isfinite(entropy_coef):
        refuse("entropy_coef", entropy_coef, "give a finite number")
    if correction is not None and surrogate.old == "rollout_logprobs":
        refuse(
            f"{type(surrogate).__name__}.old",
            surrogate.old,
            "it already goes back to the rollout: take old='old_logprobs', or no correction",
        )
    # With the rollout's log-probs for old_logprobs, the correction would be 1, or applied twice.
    ratios = () if correction is None else (surrogate.old, correction.trainer)
    recomputed = frozenset(key for key in ratios if key == "old_logprobs")
    aggregate = aggregation or TokenMean()
    with_entropy = report_entropy or entropy_coef != 0
    outputs: tuple[OutputName, ...] = ("logprobs", "entropy") if with_entropy else ("logprobs",)

    def loss_fn(token_outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        # 1. The surrogate of each token.
        logprobs = required_output(token_outputs, "logprobs")
        mask = required_like(batch, "loss_mask", logprobs)
        loss = surrogate(logprobs, batch)
        per_token = loss.per_token
        metrics = {"policy/advantage": token_mean(batch["advantages"], mask)}
        if loss.stats is not None:
            metrics |= ratio_metrics(loss.stats, mask)
        # 2. Importance weights, before the penalties: those are expectations under the current policy already.
        if correction is not None:
            weights, mismatch = correction(logprobs, batch)
            per_token, metrics = per_token * weights, metrics | mismatch
        # 3. KL penalty and entropy bonus.
        if kl is not None:
            ref = required_like(batch, "ref_logprobs", logprobs)
            old = ratio_denominator(batch, kl.old, logprobs) if kl.importance_weighted else None
            per_token = per_token + kl.per_token(logprobs, ref, mask, old)
            metrics |= kl_metrics(logprobs, ref, mask)
        if with_entropy:
            entropy = at_trained(required_output(token_outputs, "entropy"), mask)
            per_token = per_token - entropy_coef * entropy
            metrics["policy/entropy"] = token_mean(entropy, mask)
        # 4. One sum over the micro-batch; the engine divides it by the global weight.
        return aggregate.total(per_token, batch), metrics

    return Objective(loss_fn, aggregate.weight, outputs, recomputed)


def ratio_metrics(stats: RatioStats, mask: Tensor, *, prefix: str = "policy") -> dict[str, Metric]:
    """Return the statistics of a policy loss as metrics over trained tokens. See :func:`policy_objective` for their names.

    Args:
        stats: ratio statistics of the loss.
        mask: ``[T]``.
        prefix: first component of the metrics' names.
    """
    metrics = {
        f"{prefix}/ratio": token_mean(stats.ratio, mask),
        f"{prefix}/ratio_max": token_max(stats.ratio, mask, least=0.0),
        f"{prefix}/kl_old_k1": token_mean(-stats.log_ratio, mask),
        f"{prefix}/kl_old_k3": token_mean(stats.ratio - 1 - stats.log_ratio, mask),
    }
    for name in ("clipped_low", "clipped_high", "dual_clipped"):
        clipped = getattr(stats, name)
        if clipped is not None:
            metrics[f"{prefix}/{name}"] = token_mean(clipped, mask)
    return metrics
