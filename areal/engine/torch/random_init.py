"""Values for a model that was built on the meta device: computed buffers, and random weights.

Both use transformers' own initialisation. Weights are drawn in full on the CPU, one block at a time, and each rank
keeps its slices: the same seed gives the same model on every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal.engine.checkpoint.tensor_layout import transient_buffers
from areal.engine.model.packed_lm import PackedCausalLM
from areal.engine.model.random_init import draw
from areal.engine.torch.model_chunks import ModelChunks
from areal.utils.dtensor import Box, empty_like, local_shard


def materialize(model: PackedCausalLM, device: torch.device, buffer_device: torch.device) -> None:
    """Allocate memory for a model on the meta device, and compute its buffers (rotary frequencies, scales).

    Parameters stay uninitialised. Shared parameters stay shared.

    Args:
        model: sharded model on the meta device.
        device: device of the parameters.
        buffer_device: device of the buffers: the one that computes. FSDP gathers parameters of the host onto it, but
            never moves buffers.

    Raises:
        ValueError: the model has a buffer that neither a file nor its initialisation fills.
    """
    # _apply would allocate a shared parameter once per owner: record the owners first, and restore the sharing
    # afterwards.
    ties = list(_owners_by_parameter(model).values())
    host = torch.device("cpu")
    model._apply(lambda tensor: empty_like(tensor, device if isinstance(tensor, nn.Parameter) else host))
    for (first, name), *others in ties:
        for module, other in others:
            module._parameters[other] = first._parameters[name]
    # Mark all buffers, to recognise those that the initialisation does not compute.
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(_unset_value(buffer))
    _compute_buffers(model.hf)
    for name, buffer in transient_buffers(model.hf):
        if _is_unset(buffer):
            raise ValueError(
                f"{type(model.hf).__name__} has a buffer {name} that no file holds and that _init_weights does not compute, "
                "so it cannot be built on the meta device: compute it there, or make it persistent"
            )
    # Buffers were computed on the host.
    for module in model.modules():
        for name, computed in module._buffers.items():
            if computed is not None:
                module._buffers[name] = computed.to(buffer_device)


def init_weights(chunks: ModelChunks, seed: int, device: torch.device, buffer_device: torch.device) -> None:
    """Materialise a model with random weights that are equal on every layout. A value head is zero.

    Args:
        chunks: sharded model on the meta device.
        seed: seed of the weights. The random state of the process is not changed.
        device, buffer_device: as in :func:`materialize`.

    Raises:
        ValueError: transformers does not initialise a parameter of this model.
    """
    for chunk in chunks:
        materialize(chunk, device, buffer_device)
    # A name may have several shards on a rank: a tied embedding and its copy.
    shards: dict[str, list[tuple[Tensor, Box]]] = {}
    for name, tensor in chunks.stored():
        shards.setdefault(name, []).append(local_shard(tensor))

    def copy_block(block: dict[str, Tensor]) -> None:
        for name, full in block.items():
            for local, box in shards.get(f"hf.{name}", ()):
                local.copy_(full[box])

    draw(chunks.full_model.hf, seed, copy_block)
    for chunk in chunks:
        for parameter in chunk.value_head.parameters() if chunk.value_head is not None else ():
            local_shard(parameter)[0].zero_()


def _compute_buffers(hf: PreTrainedModel) -> None:
    """Run transformers' initialisation with parameters on the meta device, so that it only writes buffers."""
    # Shards cannot take part: some families write parameters with operations that DTensor does not support.
    original = [(module, dict(module._parameters)) for module in hf.modules()]
    for module, parameters in original:
        for name, parameter in parameters.items():
            if parameter is not None:
                stub = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
                stub._is_hf_initialized = True  # type: ignore[attr-defined]
                module._parameters[name] = stub
    try:
        hf.initialize_weights()
    finally:
        for module, parameters in original:
            module._parameters.update(parameters)
            # The initialisation marks modules: remove the marks, so that it can run again.
            module.__dict__.pop("_is_hf_initialized", None)


Owners = list[tuple[nn.Module, str]]


def _owners_by_parameter(root: nn.Module) -> dict[int, Owners]:
    """Return the modules of each parameter, with its name in them. The first one defines the parameter's name."""
    owners: dict[int, Owners] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    return owners


def _unset_value(buffer: Tensor) -> float | int:
    """Return a value that no initialisation computes, to mark a buffer."""
    return (
        torch.nan
        if buffer.is_floating_point()
        else (False if buffer.dtype is torch.bool else torch.iinfo(buffer.dtype).min)
    )


def _is_unset(buffer: Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return buffer.dtype is not torch.bool and bool((buffer == torch.iinfo(buffer.dtype).min).any())
