"""The balancing losses of one router, and what their sums over layers, micro-batches and ranks come to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal.utils.data import segment_mean

AUX_LOSS, Z_LOSS = "moe_aux_loss", "moe_z_loss"
"""Names of the terms."""

LOAD = "load"


def assignments(experts: Tensor, number: int) -> Tensor:
    """Which of ``number`` experts each token goes to: from int64 ``[T, K]`` to bool ``[T, E]``."""
    return (experts[..., None] == torch.arange(number, device=experts.device)).any(1)


def balance_loss(logits: Tensor, assigned: Tensor, cu_seqlens: Tensor, *, sigmoid: bool = False) -> Tensor:
    """The load-balancing loss of one layer, summed over sequences.

    Of a sequence it is ``E * sum_e f_e * P_e``, where ``f_e`` is the share of its ``T * K`` assignments that go to expert ``e``, without a
    gradient, and ``P_e`` the mean probability of ``e`` over its tokens. It is 1 where the load is even. From Switch Transformer (Fedus et
    al., 2021), equations 4 to 6, within each sequence as in DeepSeek-V3 (2024), equations 17 to 20.

    Args:
        logits: of the router, ``[T, E]``. assigned: bool ``[T, E]``. cu_seqlens: int32 ``[n + 1]``.
        sigmoid: probabilities are the sigmoids of a token's logits over their sum, instead of their softmax.

    Returns:
        A scalar, float32 or the wider dtype of ``logits``.
    """
    wide = _wide(logits)
    probabilities = wide.sigmoid() / wide.sigmoid().sum(-1, keepdim=True) if sigmoid else wide.softmax(-1)
    share = segment_mean(assigned.to(probabilities.dtype), cu_seqlens)
    share = share / share.sum(-1, keepdim=True)
    return logits.shape[-1] * (share * segment_mean(probabilities, cu_seqlens)).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """``logsumexp(logits) ** 2``, summed over tokens: keeps logits small (ST-MoE, Zoph et al., 2022, equation 5).

    Args:
        logits: of the router, ``[T, E]``.
    """
    return _wide(logits).logsumexp(-1).square().sum()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass
class RoutingSums:
    """What routers found, as host numbers; mergeable.

    Attributes:
        terms: undivided sums. loads: layer -> for each expert, the tokens that went to it.
    """

    terms: dict[str, float] = field(default_factory=dict)
    loads: dict[int, list[float]] = field(default_factory=dict)

    def merge(self, other: RoutingSums) -> None:
        """Add another stage's or rank's sums to these."""
        for name, value in other.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value
        for layer, load in other.loads.items():
            known = self.loads.get(layer, [0.0] * len(load))
            self.loads[layer] = [a + b for a, b in zip(known, load, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Load of the experts: of the fullest over the mean, averaged over layers and in the worst of them; how many got no token."""
        if not self.loads:
            return {}
        peaks = [max(load) * len(load) / sum(load) for load in self.loads.values()]
        return {
            "moe/load_max_over_mean": sum(peaks) / len(peaks),
            "moe/load_max_over_mean_worst": max(peaks),
            "moe/idle_experts": float(sum(load.count(0.0) for load in self.loads.values())),
        }
