"""Activation offload of a sharded model: its layers, and the weights that stay on the device."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal.engine.fsdp.activation_checkpointing import RecomputedForward
from areal.engine.fsdp.parallelize import transformer_layers
from areal.engine.fsdp.pipeline.schedule_specs import ScheduleSpec
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.model.vision import vision_layers
from areal.engine.torch.activations.offload import ActivationOffload
from areal.engine.torch.model_chunks import ModelChunks
from areal.utils.releases import fsdp_param_groups


def offload_activations(
    chunks: ModelChunks, offload: ActivationOffload, spec: ScheduleSpec, adapters: AdapterSet | None = None
) -> None:
    """Offload the activations of the layers of a model, in place.

    This wraps what the other steps have made of a layer's forward, inside of FSDP's hooks.

    Args:
        chunks: sharded model, with checkpointing and adapters.
        offload: of the engine.
        spec: pipeline schedule.
        adapters: adapters of the model, or ``None``.
    """

    def factors() -> Iterator[Tensor]:
        for name in () if adapters is None else adapters.names:
            for pair in adapters[name].pairs.values():  # type: ignore[index]
                yield from (pair.down.parameter, pair.up.parameter)

    for stage, chunk in zip(chunks.stages, chunks, strict=True):
        layers = [*vision_layers(chunk.hf), *transformer_layers(chunk)]
        for layer in layers:
            if isinstance(layer.forward, RecomputedForward):
                layer.forward.hooks = offload.hooks
        # The backward of a micro-batch follows its forward, except on earlier stages, and if all forwards come first.
        is_last = stage == len(chunks.split.spans) - 1
        offload.attach(chunk, layers, read_weights, factors, last_too=not is_last or spec.all_forwards_first)


def read_weights(layer: nn.Module) -> Iterator[Tensor]:
    """Yield the local tensors of the weights and buffers that a layer has read in its forward."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        yield _local(tensor)
    # Modules of their own, such as experts, are sharded again when their forward ends.
    for module in layer.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_param_groups(module):
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "_unsharded_param"):
                        yield _local(parameter._unsharded_param)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
