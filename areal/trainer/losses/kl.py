"""Estimators of the KL divergence from a reference, from log-probs of sampled tokens.

With ``d = log p_ref - log p`` at a token that the policy ``p`` sampled (Schulman, "Approximating KL Divergence", 2020):

=====  =======================  ==============================  =======================================================================
name   value                    as an estimate of KL(p || ref)   as a loss: expected gradient, on-policy
=====  =======================  ==============================  =======================================================================
k1     ``-d``                   unbiased, high variance          0: the mean of ``grad log p``. As a loss it only adds noise
k2     ``d**2 / 2``             biased, low variance             that of KL(p || ref): right
k3     ``exp(d) - 1 - d``       unbiased, low variance           that of KL(ref || p), the other direction; near ``p = ref`` the same
=====  =======================  ==============================  =======================================================================

An unbiased value does not imply an unbiased gradient, because the samples depend on the policy too. Multiplied by the ratio ``p / p_sampled``
with its gradient, k1 and k3 have the gradient of KL(p || ref), on-policy and off-policy: ``KLTerm(importance_weighted=True)``, as for k3 in
DeepSeek-V3.2 (2025). k2 is correct without the ratio, on-policy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from areal.api import Metric
from areal.trainer.losses.inputs import OldLogprobs, refuse
from areal.trainer.losses.masked import LOG_RATIO_BOUND, bounded, log_ratio, token_mean

KLEstimator = Literal["k1", "k2", "k3"]


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return ``log p - log p_ref`` ``[T]``, 0 where the mask is 0. All arguments are ``[T]``. As a loss, its expected gradient is 0."""
    return log_ratio(logprobs, ref_logprobs, mask)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return ``(log p - log p_ref)**2 / 2`` ``[T]``. As a loss, its expected gradient is that of KL(p || ref), on-policy."""
    return 0.5 * log_ratio(logprobs, ref_logprobs, mask).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return ``exp(d) - 1 - d`` ``[T]`` with ``d = log p_ref - log p``, at least 0. Expected gradient: that of KL(ref || p)."""
    # Clamped from above only: exp(d) cannot overflow for negative d, where the gradient back to the reference must remain.
    d = (-log_ratio(logprobs, ref_logprobs, mask)).clamp(max=LOG_RATIO_BOUND)
    return d.expm1() - d


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


@dataclass(frozen=True)
class KLTerm:
    """KL penalty towards a reference, added to the loss of each token before aggregation. Needs ``ref_logprobs``.

    Attributes:
        coef: at least 0; 0.04 with k3 in GRPO (Shao et al., 2024).
        estimator: see the table of this module for the gradient of each.
        importance_weighted: multiply by the ratio to the policy that sampled, with its gradient. Correct for k1 and k3, on- and off-policy.
        old: log-probs of that policy; used only if importance-weighted.
        clamp: bound of the estimate's size; ``None`` for no bound. Beyond it the gradient is 0: a token far from the reference is not pulled
            back. verl clamps k3 to 10.

    Raises:
        ValueError: an option is out of range.
    """

    coef: float
    estimator: KLEstimator = "k3"
    importance_weighted: bool = False
    old: OldLogprobs = "old_logprobs"
    clamp: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.coef < math.inf:
            refuse("KLTerm.coef", self.coef, "give a finite number of at least 0")
        if self.estimator not in KL_ESTIMATORS:
            refuse("KLTerm.estimator", self.estimator, f"choose one of {list(KL_ESTIMATORS)}")
        if self.clamp is not None and not self.clamp > 0:
            refuse("KLTerm.clamp", self.clamp, "give a positive number, or None for no bound")
        if self.old not in get_args(OldLogprobs):
            refuse("KLTerm.old", self.old, f"choose one of {list(get_args(OldLogprobs))}")

    def per_token(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, old_logprobs: Tensor | None) -> Tensor:
        """Return ``coef`` times the estimate, ``[T]``. ``old_logprobs`` is used only if the term is importance-weighted.

        Raises:
            ValueError: the term is importance-weighted and ``old_logprobs`` is ``None``.
        """
        estimate = KL_ESTIMATORS[self.estimator](logprobs, ref_logprobs, mask)
        if self.clamp is not None:
            estimate = estimate.clamp(-self.clamp, self.clamp)
        if self.importance_weighted:
            if old_logprobs is None:
                raise ValueError(
                    f"KLTerm.importance_weighted = True needs old_logprobs, from batch[{self.old!r}]: pass them"
                )
            # The ratio keeps its gradient: that of the estimate alone would be biased.
            estimate = bounded(log_ratio(logprobs, old_logprobs, mask)).exp() * estimate
        return self.coef * estimate


def kl_metrics(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, prefix: str = "kl_ref") -> dict[str, Metric]:
    """Return all three estimates as means over trained tokens, in nats: ``<prefix>/k1``, ``/k2``, ``/k3``. All tensors are ``[T]``."""
    return {
        f"{prefix}/{name}": token_mean(estimate(logprobs.detach(), ref_logprobs, mask), mask)
        for name, estimate in KL_ESTIMATORS.items()
    }
