"""Random weights as transformers draws them: on the CPU, one block at a time and in full, so that a seed gives one model on every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@torch.no_grad()
def draw(hf: PreTrainedModel, seed: int, take: Callable[[dict[str, Tensor]], None]) -> None:
    """Draw all parameters of a model by its own initialisation.

    Args:
        hf: on the meta device, or sharded: shapes and dtypes count, and nothing is written to it.
        seed: of the weights. The generators of the process are left as they were.
        take: called with each block's parameters by name, full and on the CPU. A shared parameter comes once, under its first name.

    Raises:
        ValueError: transformers does not initialise some parameter of this model.
    """
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in _blocks(hf):
            take({names[key]: full for key, full in _draw(hf, block).items()})


def _blocks(hf: PreTrainedModel) -> Iterator[list[str]]:
    """Module names, cut so that a block can be in memory in full: one layer each, and all that is in no layer."""
    blocks: dict[tuple[str, ...], list[str]] = {(): []}
    for name, _ in hf.named_modules():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        blocks.setdefault(() if number is None else tuple(parts[: number + 1]), []).append(name)
    yield from blocks.values()


def _draw(hf: PreTrainedModel, block: list[str]) -> dict[int, Tensor]:
    """Values of a block's parameters, by the ``id`` of the parameter."""
    modules = {name: hf.get_submodule(name) for name in block}
    slots = [(module, name) for module in modules.values() for name in module._parameters]
    own = {slot: slot[0]._parameters[slot[1]] for slot in slots}
    full: dict[int, nn.Parameter] = {}
    for (module, name), parameter in own.items():
        if parameter is not None:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype).fill_(torch.nan)
            module._parameters[name] = full.setdefault(id(parameter), nn.Parameter(empty))
    try:
        for name, module in modules.items():
            _closest_model(hf, name)._init_weights(module)
    finally:
        for (module, name), parameter in own.items():
            module._parameters[name] = parameter
    for (module, name), parameter in own.items():
        if parameter is not None and full[id(parameter)].isnan().any():
            raise ValueError(f"init_from_scratch: transformers does not initialise {type(module).__name__}.{name}")
    return {key: parameter.detach() for key, parameter in full.items()}


def _closest_model(hf: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost model that a module belongs to: its ``_init_weights`` is the one that counts."""
    found = hf
    for end in (i for i, c in enumerate(name + ".") if c == "."):
        module = hf.get_submodule(name[:end]) if name else hf
        found = module if isinstance(module, PreTrainedModel) else found
    return found
