"""Hooks on the routers of a Hugging Face model: replay recorded routing, count tokens per expert, and add the gradient
of balancing losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal.engine.batch_rules import Experts
from areal.engine.moe.routing import Routing
from areal.utils.releases import installed_release


def _softmax_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = F.softmax(logits, dtype=torch.float32, dim=-1).gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def _sigmoid_weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


ROUTERS: Mapping[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "Qwen3MoeTopKRouter": _softmax_weights,
    "DeepseekV3TopkRouter": _sigmoid_weights,
}
"""Supported routers, which return logits, weights and experts, and the function that computes weights for replayed
experts.
"""


def fsdp_expert_info(layers: Sequence[nn.Module]) -> Experts:
    """Return a description of a model's experts, which is empty if no router is supported."""
    routers: list[Any] = _routers(layers)
    if not routers:
        return Experts()
    sigmoid = ROUTERS[type(routers[0]).__name__] is _sigmoid_weights
    return Experts(len(routers), routers[0].num_experts, routers[0].top_k, sigmoid)


def why_no_router(model_type: str) -> str:
    """Return the reason why a model has no supported router, for error messages."""
    if model_type == "deepseek_v3" and installed_release("transformers") < (5, 14):
        return f"the router of {model_type!r} needs transformers 5.14 or newer, installed is {version('transformers')}"
    return f"no router of {model_type!r} is one of {', '.join(ROUTERS)}"


def watch_routers(layers: Sequence[nn.Module], before: int = 0) -> None:
    """Make layers accept ``routing`` and pass it to their routers during forward and recomputation, in place.

    Must run before activation checkpointing is applied, so that recomputation sees the routing.

    Args:
        layers: layers of one model chunk.
        before: number of routers in the layers before these.
    """
    for layer in layers:
        watched = [_WatchedRouter(router, before + i) for i, router in enumerate(_routers([layer]))]
        before += len(watched)
        layer.forward = _with_routing(layer.forward, watched)


def _routers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    known = [module for layer in layers for module in layer.modules() if type(module).__name__ in ROUTERS]
    # Before transformers 5.14 the router of DeepSeek returns logits alone, and the layer around it chooses experts.
    return [router for router in known if hasattr(router, "num_experts")]


class _WatchedRouter:
    """One router with a forward hook."""

    def __init__(self, router: nn.Module, index: int) -> None:
        self.router: Any = router
        self.routing: Routing | None = None
        self._index = index
        router.register_forward_hook(self._routed)

    def _routed(
        self, router: nn.Module, args: Any, out: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Replace or record the output of the router: logits ``[T, E]``, weights ``[T, K]`` and expert ids ``[T, K]``."""
        if self.routing is None:
            return out
        logits, weights, experts = out
        # Replayed experts get weights from the current logits, so that gradients flow.
        if self.routing.experts is not None:
            experts = self.routing.replayed(self._index, experts)
            weights = ROUTERS[type(router).__name__](router, logits, experts)
        elif self.routing.record:  # not every router sorts experts by weight
            best = weights.argsort(-1, descending=True)
            weights, experts = weights.gather(1, best), experts.gather(1, best)
        return logits, self.routing.watch(self._index, logits, experts, weights), experts


def _with_routing(forward: Callable[..., Any], routers: Sequence[_WatchedRouter]) -> Callable[..., Any]:
    def forward_with_routing(*args: Any, routing: Routing | None = None, **options: Any) -> Any:
        # Set for this call only: a recomputation runs this wrapper again.
        for router in routers:
            router.routing = routing
        try:
            return forward(*args, **options)
        finally:
            for router in routers:
                router.routing = None

    return forward_with_routing
