"""DRO: policy gradient with a quadratic penalty on the log-ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.tinker.backends.losses.loss_interface import RATIO_KEYS, sampling_ratio_metrics, target_logprobs


@dataclass(frozen=True)
class QuadraticPenalty:
    """``-sum(logprobs * A - beta / 2 * (log p - log q) ** 2)`` (Richemond et al., 2024).

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``dro``. The source states no default; 0.05 is the value of its example.
    """

    beta: float = 0.05
    inputs: ClassVar[frozenset[str]] = RATIO_KEYS
    optional: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"loss_fn_config of 'dro': beta = {self.beta}: it must be finite and at least 0")

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs = target_logprobs(outputs)
        penalty = (logprobs - batch["logprobs"]).square()
        objective = logprobs * batch["advantages"] - 0.5 * self.beta * penalty
        return -objective.sum(), sampling_ratio_metrics(logprobs, batch)
