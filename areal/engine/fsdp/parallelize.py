"""How a model is laid over ranks. The order matters, and each step says why it stands where it does."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from areal.api.config import TrainEngineConfig, torch_dtype
from areal.api.parallel import ParallelDims
from areal.engine.fsdp.activation_checkpointing import recompute_layers
from areal.engine.fsdp.expert_parallel import spread_experts, stacked_experts
from areal.engine.fsdp.tensor_parallel import split_tensors
from areal.engine.model.packed_lm import PackedCausalLM
from areal.utils.distributed import make_mesh

_mesh_numbers = itertools.count()


def build_param_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh:
    """The mesh of a layout for what concerns parameters: an axis of pipeline ranks, one of replicas, one of shards, and one of
    tensor-parallel ranks.

    Context-parallel ranks hold the same parameters and different tokens, so that they shard and reduce like data-parallel ones.
    """
    return _own_mesh(
        device_type, pp=dims.pp, dp_replicate=dims.dp_replicate, dp_shard_cp=dims.dp_shard * dims.cp, tp=dims.tp
    )


def build_expert_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh:
    """The mesh for the weights of experts, whose shards are of a part of the experts: axes for pipeline ranks, replicas, shards of the
    same experts, and ranks that share the experts.
    """
    shards = dims.dp_shard * dims.cp // dims.ep
    return _own_mesh(device_type, pp=dims.pp, dp_replicate=dims.dp_replicate, edp=shards, ep=dims.ep)


def _own_mesh(device_type: str, **axes: int) -> DeviceMesh:
    # DTensor answers from caches in which equal meshes are one: without names of its own, an engine's parameters could be given the
    # mesh, and the closed groups, of an earlier engine of this layout.
    number = next(_mesh_numbers)
    return make_mesh(device_type, tuple(axes.values()), tuple(f"{axis}_{number}" for axis in axes))


def parallelize(
    model: PackedCausalLM, mesh: DeviceMesh, config: TrainEngineConfig, expert_mesh: DeviceMesh | None = None
) -> None:
    """Split tensors, checkpoint activations and shard parameters, in place. The model may be on the meta device.

    Args:
        mesh: from :func:`build_param_mesh`. expert_mesh: from :func:`build_expert_mesh`, where experts are spread over ranks.
    """
    layers = transformer_layers(model)
    *_, tp = mesh.mesh_dim_names or ()
    # First the tensors: FSDP shards what is left of each on a rank.
    if mesh[tp].size() > 1:
        split_tensors(model, mesh[tp])
    if expert_mesh is not None:
        spread_experts(model, expert_mesh[(expert_mesh.mesh_dim_names or ())[3]])
    # Then checkpointing: it acts in a layer's own forward, inside the hooks that gather the layer's parameters.
    recompute_layers(layers, config.activation_checkpointing, config.fsdp.checkpointed_share)
    compute, master = torch_dtype(config.dtype), torch_dtype(config.master_dtype)
    options: dict[str, Any] = {
        # A stage runs several forwards before the first backward: by default its weights stay gathered meanwhile.
        "reshard_after_forward": config.dims.pp == 1
        if config.fsdp.reshard_after_forward is None
        else config.fsdp.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if compute == master else compute,
            reduce_dtype=torch_dtype(config.grad_reduce_dtype),
            # Temperatures and positions keep their dtype.
            cast_forward_inputs=False,
        ),
        # Pinning host memory needs an accelerator.
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if config.fsdp.cpu_offload
        else OffloadPolicy(),
    }
    if expert_mesh is not None:
        for experts in stacked_experts(model):
            # By rows of each expert: the experts themselves are spread already.
            fully_shard(experts, mesh=_shard_mesh(expert_mesh), shard_placement_fn=_by_rows, **options)
    # Layers before the root: what no layer claims (embedding, last norm, heads) becomes the root's group, which stays
    # gathered from the first use to the last, so that tied embeddings share one gathered weight.
    for layer in layers:
        fully_shard(layer, mesh=_shard_mesh(mesh), **options)
    fully_shard(model, mesh=_shard_mesh(mesh), **{**options, "reshard_after_forward": False})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums over ranks. Gloo has no pre-multiplied sum, so the reduction itself is asked to be a plain one.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """One replica needs no replicate axis: a one-dimensional mesh spares every reduction a second step."""
    _, replicas, shards, _ = mesh.mesh_dim_names or ()
    return mesh[replicas, shards] if mesh.size(1) > 1 else mesh[shards]


def _by_rows(parameter: nn.Parameter) -> Shard:
    return Shard(1)


def transformer_layers(model: PackedCausalLM) -> list[nn.Module]:
    """The modules to gather one at a time: the model's decoder layers, as transformers names them.

    Raises:
        ValueError: none is found.
    """
    names = set(getattr(model.hf, "_no_split_modules", None) or ())
    layers = [module for module in model.hf.modules() if type(module).__name__ in names]
    if not layers:
        layers = max(
            (list(module) for module in model.hf.modules() if isinstance(module, nn.ModuleList)), key=len, default=[]
        )
    if not layers:
        raise ValueError(f"{type(model.hf).__name__} has no list of layers to shard; the FSDP engine cannot run it")
    return layers
