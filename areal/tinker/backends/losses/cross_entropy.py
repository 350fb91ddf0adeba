"""Cross-entropy: weighted negative log-likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.tinker.backends.losses.loss_interface import target_logprobs


@dataclass(frozen=True)
class CrossEntropy:
    """``sum(-logprobs * weights)``, with weights of any sign.

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``cross_entropy``. With targets ``[T, K]`` the sum is over all ``K`` targets
    of a position, so that weights of a distribution give the cross-entropy with it. Without weights, all are 1.
    """

    inputs: ClassVar[frozenset[str]] = frozenset({"target_tokens"})
    optional: ClassVar[frozenset[str]] = frozenset({"weights"})

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        return (-target_logprobs(outputs) * batch.get("weights", 1.0)).sum(), {}
