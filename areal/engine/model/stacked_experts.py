"""Modules of transformers with the weights of all experts of a layer in one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the stacked weights of experts in transformers: ``[E, 2 I, H]`` and ``[E, H, I]``."""

_STACKED = (*WEIGHTS, "up_proj", "weight")
"""Names of weights of three dimensions that some module of experts has."""

_GROUPED = {getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)}


def is_grouped_product(function: Any) -> bool:
    """Return whether a function is the product of sorted rows with the experts' weights: torch's, or that of transformers for other dtypes."""
    # That of transformers exists once its layers are imported.
    return function in _GROUPED or function is getattr(torch.ops.transformers, "grouped_mm_fallback", None)


def has_stacked_experts(module: nn.Module) -> bool:
    """Return whether this module has the stacked weights itself. Its forward takes hidden states, expert ids and expert weights."""
    # A dense layer may have linear modules of these names (Phi-3, Zamba2).
    weights = [getattr(module, name, None) for name in WEIGHTS]
    return all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def stacked_weights(module: nn.Module) -> list[str]:
    """Return the names of the weights of experts that this module has itself, in any stacked form."""
    # The kernel of a convolution has three dimensions and the name of experts' weights in some families.
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return []
    return [key for key, weight in module.named_parameters(recurse=False) if weight.dim() == 3 and key in _STACKED]


def check_convertible(name: str, module: nn.Module, setting: str) -> None:
    """Raise if a module has experts in a form whose products no conversion finds.

    Args:
        name: of the module within its layer.
        setting: name of the setting that leaves modules out.

    Raises:
        ValueError: names the module and the way out.
    """
    stacks = stacked_weights(module)
    if not stacks:
        return
    if not has_stacked_experts(module):
        why = f"the experts' weights {', '.join(stacks)}"
    # [E, H, 2 I] and [E, I, H], where others have [E, 2 I, H] and [E, H, I].
    elif module.get_parameter("gate_up_proj").shape[-1] != module.get_parameter("down_proj").shape[-2]:
        why = "experts whose inputs are rows"
    else:
        return
    raise ValueError(
        f"{name} has {why}, which are not converted here: add {name.rpartition('.')[2]!r} to {setting}, which leaves them as they are"
    )


def stacked_experts(module: nn.Module) -> list[Any]:
    """Return the modules inside of a module that have stacked experts."""
    return [x for x in module.modules() if has_stacked_experts(x)]


def count_weightless(experts: nn.Module) -> int:
    """Return the number of experts that return their input, which have the ids after those of the others (LongCat-Flash)."""
    return getattr(experts, "zero_expert_num", 0)


def reach_experts(model: nn.Module) -> None:
    """Let a backward reach the weights of experts also where all tokens take experts without weights, in place.

    A rank without a gradient of some weights would reduce fewer numbers than the others.
    """
    for experts in stacked_experts(model):
        if count_weightless(experts):
            experts.register_forward_hook(_reach_weights)


def _reach_weights(experts: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> Tensor:
    """Return the output, which depends on the weights of the experts. ``inputs[1]`` are the ids of experts."""
    if (inputs[1] < len(experts.down_proj)).any():
        return output
    # A sum over nothing is 0, and has a gradient of 0.
    return output + sum(getattr(experts, name)[:0].sum() for name in WEIGHTS)


@contextmanager
def replaced_weights(module: nn.Module, weights: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the parameters of these names are other tensors."""
    own = {name: module._parameters[name] for name in weights}
    module._parameters.update(weights)
    try:
        yield
    finally:
        module._parameters.update(own)
