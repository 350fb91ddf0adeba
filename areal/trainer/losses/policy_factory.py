"""From a policy loss to an objective: with a KL penalty, an entropy bonus, a correction of the mismatch, and metrics."""

from __future__ import annotations

import math

from torch import Tensor

from areal.api import Batch, Metric, OutputName, TokenOutputs
from areal.trainer.losses.aggregate import Aggregation, TokenMean
from areal.trainer.losses.keys import refuse, required_like, required_output
from areal.trainer.losses.kl import KLTerm, kl_metrics
from areal.trainer.losses.metrics import token_max, token_mean
from areal.trainer.losses.mismatch import MismatchCorrection
from areal.trainer.losses.numerics import at_trained
from areal.trainer.losses.objective import Objective
from areal.trainer.losses.policy import RatioStats
from areal.trainer.losses.surrogate import Surrogate


def policy_objective(
    surrogate: Surrogate,
    aggregation: Aggregation | None = None,
    *,
    kl: KLTerm | None = None,
    entropy_coef: float = 0.0,
    report_entropy: bool = False,
    correction: MismatchCorrection | None = None,
) -> Objective:
    """``aggregate(w * surrogate + kl - entropy_coef * entropy)``, every part a loss of each token.

    Needs the keys ``loss_mask`` and ``advantages``, what ``surrogate.old`` names, and those of ``kl`` and ``correction``.

    Metrics, means over trained tokens where nothing else is said: ``policy/advantage``; with a ratio ``policy/ratio``, ``policy/ratio_max``,
    ``policy/kl_old_k1`` and ``policy/kl_old_k3`` (nats from the policy that the ratio is taken against), and where the loss clips
    ``policy/clipped_low``, ``policy/clipped_high``, ``policy/dual_clipped``; ``policy/entropy``; ``kl_ref/...`` and ``mismatch/...``.

    Args:
        surrogate: the policy loss.
        aggregation: :class:`TokenMean` by default.
        kl: penalty on the distance to a reference.
        entropy_coef: times the entropy, in nats, is taken off the loss.
        report_entropy: ask for the entropy and report it, also when its coefficient is 0.
        correction: importance weights ``w`` between rollout and trainer, of the surrogate alone.

    Raises:
        ValueError: an option is out of range, or the correction would be made twice. When called: the batch lacks a key.
    """
    if not math.isfinite(entropy_coef):
        refuse("entropy_coef", entropy_coef, "give a finite number")
    if correction is not None and surrogate.old == "rollout_logprobs":
        refuse(
            f"{type(surrogate).__name__}.old",
            surrogate.old,
            "it already goes back to the rollout: take old='old_logprobs', or no correction",
        )
    aggregate = aggregation or TokenMean()
    with_entropy = report_entropy or entropy_coef != 0
    outputs: tuple[OutputName, ...] = ("logprobs", "entropy") if with_entropy else ("logprobs",)

    def loss_fn(token_outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs = required_output(token_outputs, "logprobs")
        mask = required_like(batch, "loss_mask", logprobs)
        loss = surrogate(logprobs, batch)
        per_token = loss.per_token
        metrics = {"policy/advantage": token_mean(batch["advantages"], mask)}
        if loss.stats is not None:
            metrics |= ratio_metrics(loss.stats, mask)
        if correction is not None:
            weights, found = correction(logprobs, batch)
            per_token, metrics = per_token * weights, metrics | found
        if kl is not None:
            ref = required_like(batch, "ref_logprobs", logprobs)
            old = required_like(batch, kl.old, logprobs) if kl.importance_weighted else None
            per_token = per_token + kl.per_token(logprobs, ref, mask, old)
            metrics |= kl_metrics(logprobs, ref, mask)
        if with_entropy:
            entropy = at_trained(required_output(token_outputs, "entropy"), mask)
            per_token = per_token - entropy_coef * entropy
            metrics["policy/entropy"] = token_mean(entropy, mask)
        return aggregate.total(per_token, batch), metrics

    return Objective(loss_fn, aggregate.weight, outputs)


def ratio_metrics(stats: RatioStats, mask: Tensor, *, prefix: str = "policy") -> dict[str, Metric]:
    """A policy loss's statistics as metrics over trained tokens; ``mask`` ``[T]``. See :func:`policy_objective`."""
    metrics = {
        f"{prefix}/ratio": token_mean(stats.ratio, mask),
        f"{prefix}/ratio_max": token_max(stats.ratio, mask, least=0.0),
        f"{prefix}/kl_old_k1": token_mean(-stats.log_ratio, mask),
        f"{prefix}/kl_old_k3": token_mean(stats.ratio - 1 - stats.log_ratio, mask),
    }
    for name in ("clipped_low", "clipped_high", "dual_clipped"):
        share = getattr(stats, name)
        if share is not None:
            metrics[f"{prefix}/{name}"] = token_mean(share, mask)
    return metrics
