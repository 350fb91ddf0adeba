"""Balancing losses of one router, and their sums over layers, micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal.api.batch import Metric
from areal.utils.data import segment_mean

AUX_LOSS, Z_LOSS = "moe_aux_loss", "moe_z_loss"
"""Names of the terms in the loss."""

LOAD = "load"


def assignments(experts: Tensor, number: int) -> Tensor:
    """Convert expert ids int64 ``[T, K]`` to a mask over all ``number`` experts, bool ``[T, E]``."""
    return (experts[..., None] == torch.arange(number, device=experts.device)).any(1)


def balance_loss(logits: Tensor, assigned: Tensor, cu_seqlens: Tensor, *, sigmoid: bool = False) -> Tensor:
    """Return the load-balancing loss of one layer, summed over sequences.

    For one sequence it is ``E * sum_e f_e * P_e``: ``f_e`` is the fraction of the sequence's ``T * K`` assignments that go to
    expert ``e``, without a gradient, and ``P_e`` the mean probability of ``e`` over its tokens. It is 1 if the load is even.
    From Switch Transformer (Fedus et al., 2021), equations 4 to 6, per sequence as in DeepSeek-V3 (2024), equations 17 to 20.

    Args:
        logits: ``[T, E]``. Logits of the router.
        assigned: bool ``[T, E]``. Experts of each token.
        cu_seqlens: int32 ``[n + 1]``. Start of each sequence.
        sigmoid: whether probabilities are normalized sigmoids of the logits instead of their softmax.

    Returns:
        A scalar, in float32 or the wider dtype of ``logits``.
    """
    wide = _wide(logits)
    probabilities = wide.sigmoid() / wide.sigmoid().sum(-1, keepdim=True) if sigmoid else wide.softmax(-1)
    # f_e of each sequence, [n, E]: the mean of 0 and 1, normalized because a token has K experts.
    fraction = segment_mean(assigned.to(probabilities.dtype), cu_seqlens)
    fraction = fraction / fraction.sum(-1, keepdim=True)
    return logits.shape[-1] * (fraction * segment_mean(probabilities, cu_seqlens)).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Return ``logsumexp(logits) ** 2``, summed over tokens. Keeps logits small (ST-MoE, Zoph et al., 2022, equation 5).

    Args:
        logits: ``[T, E]``. Logits of the router.
    """
    return _wide(logits).logsumexp(-1).square().sum()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass
class RoutingSums:
    """Sums of balancing losses and expert load, as Python numbers.

    Attributes:
        terms: term -> undivided sum.
        loads: layer -> number of tokens of each expert.
    """

    terms: dict[str, float] = field(default_factory=dict)
    loads: dict[int, list[float]] = field(default_factory=dict)

    def merge(self, other: RoutingSums) -> None:
        """Add another stage's or rank's sums to these."""
        for name, value in other.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value
        for layer, load in other.loads.items():
            previous = self.loads.get(layer, [0.0] * len(load))
            self.loads[layer] = [a + b for a, b in zip(previous, load, strict=True)]

    def metrics(self) -> dict[str, Metric]:
        """Return metrics of the load: the largest over the mean (averaged over layers, and of the worst layer), and idle experts."""
        if not self.loads:
            return {}
        # The largest load over the mean load, for each layer: 1 is even.
        peaks = [max(load) * len(load) / sum(load) for load in self.loads.values()]
        return {
            "moe/load_max_over_mean": Metric(sum(peaks) / len(peaks)),
            "moe/load_max_over_mean_worst": Metric(max(peaks), reduce="max"),
            "moe/idle_experts": Metric(float(sum(load.count(0.0) for load in self.loads.values()))),
        }
