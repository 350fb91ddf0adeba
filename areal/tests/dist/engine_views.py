"""What can be seen of an engine: observations that differ if an option has an effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from areal.api import TrainEngine
from areal.engine.fsdp.parallelize import transformer_layers
from areal.tests.harness.tiny import global_batch, local_batch, loss


def weights(engine: TrainEngine) -> list[Any]:
    return [(name, tensor.dtype, tensor.double().abs().sum().item()) for name, tensor in engine.named_tensors()]


def numbers(engine: TrainEngine) -> list[Any]:
    """Three steps of training."""
    steps = [engine.train_batch(local_batch(engine, global_batch(seed)), loss) for seed in range(3)]
    return [x for step in steps for x in (step.loss, step.grad_norm, step.lr)]


def terms(engine: TrainEngine) -> list[Any]:
    step = engine.train_batch(global_batch(), loss)
    return sorted([*step.terms, *step.metrics])


def cut(engine: TrainEngine) -> list[Any]:
    """Tokens of each micro-batch, or the error."""
    try:
        return [mb.n_tokens for mb in engine.microbatches(global_batch())]
    except ValueError as error:
        return [str(error)]


def shared(engine: TrainEngine) -> list[Any]:
    same = torch.arange(12)
    return [mb.tree is not None for mb in engine.microbatches([{"input_ids": same}, {"input_ids": same}])]


def column(engine: TrainEngine) -> list[Any]:
    """Shape of a key that is per token by its shape, or per sequence by an option."""
    batch = [{"input_ids": torch.arange(5), "extra": torch.zeros(5)} for _ in range(2)]
    return [tuple(mb.data["extra"].shape) for mb in engine.microbatches(batch)]


def images(engine: TrainEngine) -> list[Any]:
    batch = [{"input_ids": torch.arange(5), "pixels": torch.zeros(n, 3)} for n in (2, 4)]
    try:
        return [len(mb.data["pixels"]) for mb in engine.microbatches(batch)]
    except ValueError as error:
        return [str(error)]


def layers(engine: TrainEngine) -> list[Any]:
    """The decoder layers of this rank."""
    model: Any = engine._require_components().model
    if engine.dims.backend == "megatron":
        return [layer for chunk in model for layer in chunk.module.decoder.layers]
    return [layer for chunk in model for layer in transformer_layers(chunk)]


def depth(engine: TrainEngine) -> list[Any]:
    """Layers of this rank that have weights."""
    return [sum(any(True for _ in layer.parameters()) for layer in layers(engine))]


def recomputed(engine: TrainEngine) -> list[Any]:
    """How often the feed-forward of each layer runs in a step of one micro-batch."""
    if engine.dims.backend == "jax":
        return [engine._spec.recompute]
    counts, all_layers = dict[int, int](), layers(engine)

    def count(number: int) -> Callable[..., None]:
        return lambda module, args: counts.update({number: counts.get(number, 0) + 1})

    for number, layer in enumerate(all_layers):
        layer.mlp.register_forward_pre_hook(count(number))
    engine.train_batch([{"input_ids": torch.arange(9)}], lambda out, mb: -out.logprobs.sum())
    return [counts[number] for number in range(len(all_layers))]


def kept_logits(engine: TrainEngine) -> list[Any]:
    if engine.dims.backend == "jax":
        return [engine._spec.keep_bytes]
    model: Any = engine._require_components().model
    return [module._keep_bytes for module in model.modules() if hasattr(module, "_keep_bytes")]


def files(engine: TrainEngine) -> list[Any]:
    engine.offload()
    folder = engine.config.offload_dir
    return [] if folder is None else [file.is_file() for file in Path(folder).rglob("*")]


def switches(engine: TrainEngine) -> list[Any]:
    return [torch.are_deterministic_algorithms_enabled()]


def adapters(engine: TrainEngine) -> list[Any]:
    if engine.config.lora is None:
        return []
    return [(name, tuple(tensor.shape)) for name, tensor in engine.adapters.named_tensors()]


def trains(engine: TrainEngine) -> list[Any]:
    """Presence of an optimizer."""
    return [engine._require_components().optimizer is not None]


def optimizers(engine: TrainEngine) -> list[Any]:
    """Classes of the optimizers behind the clipping."""
    inner: Any = engine._require_components().optimizer.inner
    return [type(x).__name__ for x in (inner, *getattr(getattr(inner, "chained", None), "chained_optimizers", ()))]


def sharding(engine: TrainEngine) -> list[Any]:
    """FSDP's resharding and offloading, by layer."""
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers(engine)]
    return [(group.post_forward_mesh_info is None, group.fsdp_params[0].offload_to_cpu) for group in groups]


def compiled(engine: TrainEngine) -> list[Any]:
    return ["forward" in vars(layer) for layer in layers(engine)]


def attention(engine: TrainEngine) -> list[Any]:
    model: Any = engine._require_components().model
    return [chunk.hf.config._attn_implementation for chunk in model]


def schedule(engine: TrainEngine) -> list[Any]:
    return [engine._schedule_spec.name]


def splits(engine: TrainEngine) -> list[Any]:
    """How ranks split a token stream."""
    components = engine._require_components()
    return [components.context_parallel.mode, components.token_multiple]


def buckets(engine: TrainEngine) -> list[Any]:
    model: Any = engine._require_components().model
    return [len(chunk.bucket_groups) for chunk in model]


def limits(engine: TrainEngine) -> list[Any]:
    """Seconds that exchanges, collectives and ranks may take."""
    groups = [engine.control._group, *engine._groups._groups]  # type: ignore[attr-defined]
    gloo = [group._get_backend(torch.device("cpu")) for group in groups]
    return [engine.control._watch._silence, *sorted(backend.options._timeout.total_seconds() for backend in gloo)]  # type: ignore[attr-defined, union-attr]
