"""Distribute a model over ranks. The order of the steps matters; each step gives its reason."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from areal.api.config import ActivationCheckpointing, TrainEngineConfig, torch_dtype
from areal.engine.fsdp.activation_checkpointing import RecomputedForward, recompute_layers
from areal.engine.fsdp.expert_parallel import keep_dispatch, spread_experts
from areal.engine.fsdp.gathered_tokens import keep_gathered
from areal.engine.fsdp.tensor_plans import split_tensors
from areal.engine.model.heads import decoder_layers
from areal.engine.model.packed_lm import PackedCausalLM
from areal.engine.model.stacked_experts import reach_experts, stacked_experts
from areal.engine.model.vision import vision_layers
from areal.engine.recurrence.functions import keep_running
from areal.utils.functional.batch_invariant import batch_invariant
from areal.utils.mesh import submesh


def parallelize(
    model: PackedCausalLM, mesh: DeviceMesh, config: TrainEngineConfig, expert_mesh: DeviceMesh | None = None
) -> None:
    """Split tensors, checkpoint activations and shard parameters, in place.

    Args:
        model: may be on the meta device.
        mesh: parameter mesh, from :func:`areal.utils.mesh.build_param_mesh`.
        expert_mesh: mesh from :func:`areal.utils.mesh.build_expert_mesh`; ``None`` does not spread experts over ranks.
    """
    decoder = transformer_layers(model)
    layers = [*decoder, *vision_layers(model.hf)]
    # As the innermost hook of the experts: FSDP's own may release their weights.
    reach_experts(model)
    # Tensor and expert parallelism come first: FSDP shards the slices that they leave on a rank.
    tp = submesh(mesh, "tp")
    if tp.size() > 1:
        split_tensors(model, tp)
    if expert_mesh is not None:
        spread_experts(model, submesh(expert_mesh, "ep"))
    # Checkpointing wraps a layer's own forward, inside of FSDP's hooks, which gather the layer's parameters. Graphs of compiled layers do
    # themselves what selective checkpointing does.
    in_graphs = config.fsdp.compile and config.activation_checkpointing == "selective"
    checkpointed = vision_layers(model.hf) if in_graphs else layers
    checkpoint_layers(checkpointed, config.activation_checkpointing, config.fsdp.checkpointed_share)
    for layer in checkpointed:
        if isinstance(layer.forward, RecomputedForward):
            layer.forward.remember += [keep_running] if model.recurrence is not None else []
            # A recomputation has the bits of the forward: routers choose the same experts.
            layer.forward.remember += [lambda: batch_invariant] if model.invariant else []
    compute, master = torch_dtype(config.dtype), torch_dtype(config.master_dtype)
    options: dict[str, Any] = {
        # A pipeline stage runs several forwards before the first backward: by default its weights stay gathered.
        "reshard_after_forward": config.dims.pp == 1
        if config.fsdp.reshard_after_forward is None
        else config.fsdp.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if compute == master else compute,
            reduce_dtype=torch_dtype(config.grad_reduce_dtype),
            # Inputs are token ids, positions and temperatures: none may be rounded.
            cast_forward_inputs=False,
        ),
        # Pinning host memory needs an accelerator.
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if config.fsdp.cpu_offload
        else OffloadPolicy(),
    }
    # Experts before their layers. Experts are spread over ranks already, so that FSDP shards the rows of each expert.
    if expert_mesh is not None:
        for experts in stacked_experts(model):
            fully_shard(experts, mesh=_shard_mesh(expert_mesh, "edp"), shard_placement_fn=_by_rows, **options)
    # Layers before the root. The remaining parameters (embedding, last norm, heads) become the root's group, which stays
    # gathered from the first use to the last, so that tied embeddings share one gathered weight.
    shard_mesh = _shard_mesh(mesh, "dp_shard_cp")
    for layer in _without_shared(layers, model):
        fully_shard(layer, mesh=shard_mesh, **options)
    options["reshard_after_forward"] = False
    fully_shard(model, mesh=shard_mesh, shard_placement_fn=_evenly, **options)
    # A vision tower runs before the decoder: after the last layer of the decoder there is nothing to gather.
    if expert_mesh is not None:
        _gather_ahead([layer for layer in decoder if isinstance(layer, FSDPModule)])
    # Gradients are sums over ranks. Gloo does not support pre-multiplied sums, so that the reduction must be a plain sum.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _gather_ahead(layers: Sequence[Any]) -> None:
    """Let each of some FSDP modules gather the weights of the next layer, with its experts, before it computes.

    Otherwise the gather is issued when the next layer begins: with experts, the host waits in each layer for the numbers of tokens.
    """
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following, *stacked_experts(following)])


def checkpoint_layers(layers: Sequence[nn.Module], how: ActivationCheckpointing, fraction: float) -> None:
    """Make layers recompute their activations, but not how tokens are exchanged, in place. Arguments as for :func:`recompute_layers`."""
    recompute_layers(layers, how, fraction)
    for layer in layers:
        if isinstance(layer.forward, RecomputedForward):
            keep_gathered(layer)
            remember = keep_dispatch(layer)
            if remember is not None:
                layer.forward.remember.append(remember)


def _shard_mesh(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    """Return the mesh over which FSDP replicates and shards. Without replicas it has one axis, which saves a step of every reduction."""
    replicas = submesh(mesh, "dp_replicate")
    return submesh(mesh, "dp_replicate", shards) if replicas.size() > 1 else submesh(mesh, shards)


def _by_rows(parameter: nn.Parameter) -> Shard:
    return Shard(1)


def _evenly(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension to shard: the rows, or the columns of rows that ranks have in different numbers.

    DTensor cannot describe shards of the same dimension on two mesh axes if the first split is uneven.
    """
    if isinstance(parameter, DTensor) and parameter.placements == (Shard(0),):
        return Shard(1) if parameter.shape[0] % parameter.device_mesh.size() else None
    return None


def _without_shared(layers: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the layers that share no parameter with another module: FSDP gathers a parameter in one group only."""
    inside = {id(layer): {id(module) for module in layer.modules()} for layer in layers}
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return [
        layer for layer in layers if all(owners[id(parameter)] <= inside[id(layer)] for parameter in layer.parameters())
    ]


def transformer_layers(model: PackedCausalLM) -> list[nn.Module]:
    """Return the layers of a model's decoder, which are gathered one at a time.

    Layers inside of layers are left out: code of a layer may read the parameters of its submodules.

    Raises:
        ValueError: no list of layers was found in the model.
    """
    layers = decoder_layers(model.hf)
    if not layers:
        raise ValueError(f"{type(model.hf).__name__} has no list of layers to shard; the FSDP engine cannot run it")
    return layers
