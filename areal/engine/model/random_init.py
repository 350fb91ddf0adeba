"""Random initialization by transformers, on the CPU and in full, so that a seed gives the same weights on every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@torch.no_grad()
def draw(hf: PreTrainedModel, seed: int, receive: Callable[[dict[str, Tensor]], None]) -> None:
    """Draw all parameters of a model with the initialization of its class, one block at a time.

    Args:
        hf: model on the meta device, or sharded. Only shapes and dtypes are read; nothing is written.
        seed: seed of the weights. The global random state is left unchanged.
        receive: function that is called with the parameters of each block by name, full and on the CPU. A shared parameter
            occurs once, under its first name.

    Raises:
        ValueError: transformers does not initialize some parameter of this model.
    """
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the generators of GPUs, which are not restored.
        torch.default_generator.manual_seed(seed)
        for block in _blocks(hf):
            receive({names[key]: full for key, full in _draw_block(hf, block).items()})


def _blocks(hf: PreTrainedModel) -> Iterator[list[str]]:
    """Yield blocks of module names: one for the modules outside of layers, and one for each layer.

    Only one block is in memory in full at a time.
    """
    blocks: dict[tuple[str, ...], list[str]] = {(): []}
    for name, _ in hf.named_modules():
        # The first number in a module's name is the index of its layer.
        names = name.split(".")
        number = next((i for i, component in enumerate(names) if component.isdigit()), None)
        blocks.setdefault(() if number is None else tuple(names[: number + 1]), []).append(name)
    yield from blocks.values()


def _draw_block(hf: PreTrainedModel, block: list[str]) -> dict[int, Tensor]:
    """Return initial values of a block's parameters, keyed by the ``id`` of the parameter."""
    modules = {name: hf.get_submodule(name) for name in block}
    slots = [(module, name) for module in modules.values() for name in module._parameters]
    original = {slot: slot[0]._parameters[slot[1]] for slot in slots}

    # Put full CPU parameters in place of the model's, which may be on the meta device or sharded. Filled with NaN, so that
    # a parameter without an initialization is detected below.
    full: dict[int, nn.Parameter] = {}
    for (module, name), parameter in original.items():
        if parameter is not None:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype).fill_(torch.nan)
            module._parameters[name] = full.setdefault(id(parameter), nn.Parameter(empty))
    # Initialize them, and put the model's own parameters back.
    try:
        for name, module in modules.items():
            _closest_model(hf, name)._init_weights(module)
    finally:
        for (module, name), parameter in original.items():
            module._parameters[name] = parameter

    for (module, name), parameter in original.items():
        if parameter is not None and full[id(parameter)].isnan().any():
            raise ValueError(f"init_from_scratch: transformers does not initialise {type(module).__name__}.{name}")
    return {key: parameter.detach() for key, parameter in full.items()}


def _closest_model(hf: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost model that contains a module: its ``_init_weights`` applies."""
    closest = hf
    # Walk from the root to the module: every prefix of the name is a module on the way.
    for end in (i for i, c in enumerate(name + ".") if c == "."):
        module = hf.get_submodule(name[:end]) if name else hf
        closest = module if isinstance(module, PreTrainedModel) else closest
    return closest
