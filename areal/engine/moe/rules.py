"""Rules for recorded expert routing. They need no model, so that the driver of a group checks a batch by them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.utils.data import BatchPlan

ROUTED_EXPERTS = "routed_experts"
"""Name of a per-token key of a batch, and of an output: the experts that each token is sent to, ``[T, L, K]``."""


@dataclass(frozen=True)
class Experts:
    """The experts of a full model, over all pipeline stages.

    Attributes:
        layers: number of layers with experts.
        number: number of experts in each of these layers.
        per_token: number of experts that a token is sent to.
        sigmoid: whether routers score experts by sigmoids instead of a softmax.
    """

    layers: int = 0
    number: int = 0
    per_token: int = 0
    sigmoid: bool = False


@dataclass(frozen=True)
class RoutingRules:
    """Rules of an engine for recorded routing: in a batch, where it is replayed, and as an output.

    Attributes:
        experts: experts of the model.
        stages: number of pipeline stages.
        why_none: reason why the model counts as one without experts, for error messages.
    """

    experts: Experts
    stages: int
    why_none: str

    def check_outputs(self, outputs: Sequence[Any]) -> None:
        """Raise if routing is to be recorded, and cannot be.

        Raises:
            ValueError: the model is without experts, or its layers are on several pipeline stages.
        """
        if ROUTED_EXPERTS in outputs and not self.experts.layers:
            raise ValueError(f"outputs has {ROUTED_EXPERTS!r}, but {self.why_none}: leave it out")
        if ROUTED_EXPERTS in outputs and self.stages > 1:
            raise ValueError(
                f"outputs has {ROUTED_EXPERTS!r}, which no stage of a pipeline has of all layers: record it with a layout without 'p'"
            )

    def check(self, plan: BatchPlan) -> None:
        """Raise if the routing in a batch cannot be replayed.

        Raises:
            ValueError: names the key, the problem and the way out.
        """
        if ROUTED_EXPERTS in {**plan.tokens, **plan.sequences, **plan.payloads}:
            self._check_replay(plan.tokens.get(ROUTED_EXPERTS))

    def _check_replay(self, recorded: Tensor | None) -> None:
        """Raise unless recorded routing is ``[T, L, K]`` of distinct, valid expert ids."""
        known, what = self.experts, f"key {ROUTED_EXPERTS!r}"
        if not known.layers:
            raise ValueError(f"{what} is in the batch, but {self.why_none}: leave it out")
        # Shape and dtype.
        shape = None if recorded is None else tuple(recorded.shape[1:])
        if recorded is None or shape != (known.layers, known.per_token):
            actual = "not per-token" if shape is None else f"[B, S, {', '.join(map(str, shape))}]"
            raise ValueError(
                f"{what} is {actual}: pass [B, S, {known.layers}, {known.per_token}], the {known.per_token} experts of each token in the "
                f"{known.layers} layers that have experts"
            )
        if recorded.is_floating_point() or recorded.dtype == torch.bool:
            raise ValueError(f"{what} is {recorded.dtype}: expert ids are integers")
        if not len(recorded):
            return
        # Values: ids of the model's experts, and no expert twice for one token.
        low, high = recorded.min().item(), recorded.max().item()
        if low < 0 or high >= known.number:
            raise ValueError(
                f"{what} has ids from {low} to {high}: those of {known.number} experts are 0 to {known.number - 1}"
            )
        ordered = recorded.sort(-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise ValueError(
                f"{what} sends a token twice to the same expert: a token's {known.per_token} experts differ"
            )
