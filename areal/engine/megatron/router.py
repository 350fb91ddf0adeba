"""Routers of a Megatron-Core model: replay recorded routing, count tokens per expert, and add the gradient of
balancing losses.

Megatron-Core's own balancing losses, loss scaler, logging and replay are global to the process and stay disabled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from areal.engine.batch_rules import Experts
from areal.engine.moe.routing import Routing


def megatron_expert_info(config: TransformerConfig) -> Experts:
    """Return a description of the experts of the full model."""
    if config.num_moe_experts is None:
        return Experts()
    sigmoid = config.moe_router_score_function == "sigmoid"
    return Experts(sum(_layers_with_experts(config)), config.num_moe_experts, config.moe_router_topk, sigmoid)


def _layers_with_experts(config: TransformerConfig) -> list[int]:
    """Return for each layer of the full model 1 if it has experts, else 0."""
    every = config.moe_layer_freq
    return [int(i % every == 0) for i in range(config.num_layers)] if isinstance(every, int) else list(every)


class RoutedLayer(TransformerLayer):
    """A layer that exposes the current micro-batch to its router during forward and recomputation."""

    def forward(self, *args: Any, **options: Any) -> Any:
        if not isinstance(self.mlp, MoELayer):
            return super().forward(*args, **options)
        # Set for this call only: recomputation calls the forward again.
        router = self.mlp.router
        router.current_routing = getattr(options.get("packed_seq_params"), "routing", None)
        try:
            return super().forward(*args, **options)
        finally:
            router.current_routing = None


class RoutedTopK(TopKRouter):
    """Megatron-Core's router, with recording and replay of its choice.

    Attributes:
        current_routing: routing of the micro-batch in the current forward.
        expert_bias: float32 ``[E]``. Added to sigmoid scores for the choice of experts only. Not trained.
    """

    current_routing: Routing | None = None
    router_replay: Any

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        if config.moe_router_score_function == "sigmoid":
            zeros = torch.zeros(config.num_moe_experts, dtype=torch.float32)
            self.expert_bias = nn.Parameter(zeros, requires_grad=False)

    def set_layer_number(self, layer_number: int) -> None:
        super().set_layer_number(layer_number)
        self._number = sum(_layers_with_experts(self.config)[: layer_number - 1])

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each token's expert weights and a map of its experts, both ``[T, E]``, from the logits ``[T, 1, E]``."""
        current_routing = self.current_routing
        if current_routing is None:
            return super().routing(logits, padding_mask)
        # Megatron-Core asks its replay object for the choice: supply one for this call.
        self.router_replay = choice = _ExpertChoice(current_routing, self._number)
        try:
            weights, chosen = super().routing(logits, padding_mask)
        finally:
            self.router_replay = None
        return current_routing.watch(self._number, logits.flatten(0, -2), choice.chosen_experts(), weights), chosen


class _ExpertChoice:
    """Implements Megatron-Core's replay interface: records the choice of experts, or replaces it."""

    def __init__(self, routing: Routing, layer: int) -> None:
        self._routing, self._layer = routing, layer
        self._chosen: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores ``[T, K]`` and ids ``[T, K]`` of the chosen experts, from scores ``[T, E]``."""
        _, own = choose(scores, topk, groups, group_topk)
        self._chosen = self._routing.replayed(self._layer, own)
        return scores.gather(1, self._chosen), self._chosen

    def chosen_experts(self) -> Tensor:
        """Return the chosen experts, int64 ``[T, K]``.

        Raises:
            RuntimeError: Megatron-Core did not ask for a choice.
        """
        if self._chosen is None:
            raise RuntimeError("Megatron-Core chose experts by a fused kernel: leave moe_router_fusion off")
        return self._chosen
