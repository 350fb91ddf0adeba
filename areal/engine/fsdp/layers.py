"""What the layers of a model compute with: compiled graphs or fused functions, rounded operands, float8 numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from areal.api.config import TrainEngineConfig, torch_dtype
from areal.engine.attention.kernels import kernel_name
from areal.engine.fsdp.activation_checkpointing import spread_evenly
from areal.engine.fsdp.compile import compile_layers
from areal.engine.fsdp.parallelize import transformer_layers
from areal.engine.model.fused_layers import LayerFunctions, fuse_layers, fused_kinds, replace_linears
from areal.engine.torch.float8.layers import convert_layers
from areal.engine.torch.float8.products import float8_products
from areal.engine.torch.model_chunks import ModelChunks
from areal.engine.torch.quantization.layers import round_layers


def prepare_layers(
    chunks: ModelChunks, config: TrainEngineConfig, functions: LayerFunctions | None, device: torch.device
) -> None:
    """Replace the functions of layers as a configuration says, in place.

    Args:
        chunks: model on the meta device, not distributed yet. A pipeline stage has its own copies of modules.
        config: configuration of the engine.
        functions: functions of fused layers; ``None`` for torch's.
        device: device on which the layers will run.

    Raises:
        ValueError: layers or the device cannot carry a format.
    """
    fsdp, model_type = config.fsdp, chunks.full_model.hf.config.model_type
    layers = [transformer_layers(chunk) for chunk in chunks]
    everything = [layer for each in layers for layer in each]
    if fsdp.compile:
        share = fsdp.checkpointed_share if config.activation_checkpointing == "selective" else 0.0
        compile_layers(
            everything, fsdp.compile_backend, [layer for each in layers for layer in spread_evenly(each, share)]
        )
    # Otherwise layers run as few operations.
    else:
        for chunk in chunks:
            fuse_layers(chunk.hf, model_type, functions)
            if device.type == "cpu":
                replace_linears(chunk)
    # Before experts are spread: a rank converts those that it has.
    if fsdp.quantization is not None:
        round_layers(everything, fsdp.quantization)
    if fsdp.float8 is not None:
        convert_layers(everything, fsdp.float8, float8_products(fsdp.float8, torch_dtype(config.dtype), device))


def attention_kernel(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel of packed attention of a model of transformers, for the log. Warns if a GPU runs plain operations instead."""
    config: Any = model.config
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return kernel_name(device, dtype, softcap=softcap, sinks=sinks)


def describe_layers(config: TrainEngineConfig, model_type: str) -> dict[str, str]:
    """Return what layers compute with, for the log."""
    fsdp = config.fsdp
    kinds = "" if fsdp.compile else fused_kinds(model_type)
    applied = {
        "fused layers": f"{kinds} by {fsdp.layer_kernels}" if kinds else "none",
        "compile": f"each layer, backend {fsdp.compile_backend}" if fsdp.compile else "off",
    }
    if fsdp.quantization is not None:
        applied["quantization"] = f"{fsdp.quantization.format}, straight-through"
    if fsdp.float8 is not None:
        what = "linear layers and experts" if fsdp.float8.experts else "linear layers"
        applied["float8"] = f"{fsdp.float8.recipe}, {what}{', emulated' if fsdp.float8.emulate else ''}"
    return applied
