"""Modules of transformers with the weights of all experts of a layer in one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the stacked weights of experts in transformers: ``[E, 2 I, H]`` and ``[E, H, I]``."""

_GROUPED = {getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)}


def is_grouped_product(function: Any) -> bool:
    """Return whether a function is the product of sorted rows with the experts' weights: torch's, or that of transformers for other dtypes."""
    # That of transformers exists once its layers are imported.
    return function in _GROUPED or function is getattr(torch.ops.transformers, "grouped_mm_fallback", None)


def has_stacked_experts(module: nn.Module) -> bool:
    """Return whether this module has the stacked weights itself. Its forward takes hidden states, expert ids and expert weights."""
    return all(getattr(module, name, torch.empty(0)).dim() == 3 for name in WEIGHTS)


def stacked_experts(module: nn.Module) -> list[Any]:
    """Return the modules inside of a module that have stacked experts."""
    return [x for x in module.modules() if has_stacked_experts(x)]


@contextmanager
def replaced_weights(module: nn.Module, weights: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the parameters of these names are other tensors."""
    own = {name: module._parameters[name] for name in weights}
    module._parameters.update(weights)
    try:
        yield
    finally:
        module._parameters.update(own)
