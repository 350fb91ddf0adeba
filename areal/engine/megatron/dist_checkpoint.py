"""Tensors of a Megatron-Core model and its optimizer, under two names each: those of
:mod:`areal.engine.checkpoint.run_tensors`, which all engines read, and those of Megatron-Core's ``torch_dist``
checkpoints.

Optimizer state has the names and shapes of the ``fully_reshardable`` format, so that
``megatron.core.dist_checkpointing.load`` can read it. Each rank of the distributed optimizer has a contiguous range
of a flattened parameter. Megatron-Core gathers all ranges on every rank's host before writing. Here each rank writes
only its own range, as the boxes of Hugging Face tensors that the range covers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from areal.engine.checkpoint.dcp import TensorBoxes, TensorPlace
from areal.engine.checkpoint.gather_slices import Slice
from areal.engine.checkpoint.run_tensors import MODEL, OPTIM, weight_key
from areal.engine.megatron.model.packed_gpt import PackedGPT
from areal.engine.megatron.optimizer.main_parameters import main_parameters, present_optimizers
from areal.engine.megatron.weight_mapping import LocalParameter
from areal.utils.dtensor import Box

OPTIMIZER = "optimizer.state."
"""Prefix of the keys of optimizer state, followed by the name of the state and the key of the parameter."""

MAINS = ("param", "fp32_param")
"""Names of main parameters: with a distributed optimizer, and without."""

FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": True,
}
"""Metadata of the format for Megatron-Core, chosen so that keys do not depend on the layout, and so that a tensor has the
rows of one Hugging Face tensor, or of one after the other: a box has the same form under both names."""

ModelTensors = dict[Tensor, list[ShardedTensor]]
"""For each tensor of a model, by identity, its tensors in the checkpoint: one, or the components of a fused tensor in
order.
"""


@torch.no_grad()
def model_tensors(chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection) -> ModelTensors:
    """Return the parameters and buffers of this rank's chunks."""
    tensors: ModelTensors = {}
    for chunk in chunks:
        for entry in nested_values(_sharded_state(chunk.module, groups)):
            if isinstance(entry, ShardedTensorFactory):
                tensors[entry.data] = list(nested_values(entry.build()))
            elif isinstance(entry, ShardedTensor):  # excludes the empty extra state of Transformer Engine's modules
                tensors[entry.data] = [entry]
    return tensors


def _sharded_state(chunk: PackedGPT, groups: ProcessGroupCollection) -> dict[str, Any]:
    for module in chunk.modules():
        if isinstance(module, MegatronModule) and not hasattr(module, "tp_group"):
            module.tp_group = groups.tp  # otherwise Megatron-Core reads parallel_state, which is unused here
    metadata = {"dp_cp_group": groups.dp_cp, **FORMAT}
    if not (chunk.share_embeddings_and_output_weights and chunk.post_process and not chunk.pre_process):
        return chunk.sharded_state_dict(metadata=metadata)
    # A tied head on another stage is not saved: it is a copy of the embedding. Megatron-Core would query parallel_state
    # for it.
    chunk.share_embeddings_and_output_weights = False
    try:
        return chunk.sharded_state_dict(metadata=metadata)
    finally:
        chunk.share_embeddings_and_output_weights = True


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of a parameter on this rank.

    Attributes:
        parameter: parameter of the model.
        start: position of the state in the flattened parameter.
        states: tensors by name.
        main: name of the main parameter in the checkpoint; ``None`` if it is the model's parameter or private to
            the optimizer.
        main_is_view: whether the main parameter is memory of the model.
    """

    parameter: nn.Parameter
    start: int
    states: dict[str, Tensor]
    main: str | None = None
    main_is_view: bool = False


def sub_optimizers(chained: ChainedOptimizer | None) -> list[MegatronOptimizer]:
    """Return the optimizers with parameters on this rank. Missing state is created."""
    optimizers = present_optimizers(chained)
    for optimizer in optimizers:
        inner = optimizer.optimizer
        if optimizer.init_state_fn is not None:
            optimizer.init_state_fn(inner, optimizer.config)
        # State that torch would create in the first step.
        for group in inner.param_groups:
            for main in group["params"]:
                if isinstance(inner, torch.optim.Adam):
                    inner.state[main].setdefault("step", torch.tensor(0.0))
                elif group.get("momentum"):
                    inner.state[main].setdefault("momentum_buffer", torch.zeros_like(main))
        # Megatron-Core saves one number for all, and AdamW does not count the steps of matrices that Muon updates.
        counts = [state["step"] for state in inner.state.values() if "step" in state]
        for count in counts:
            count.copy_(max(counts))
    return optimizers


def optimizer_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    """Yield the state of each parameter that an optimizer updates on this rank."""
    state = optimizer.optimizer.state
    # The distributed optimizer has a range of each flattened parameter.
    if isinstance(optimizer, DistributedOptimizer):
        for parameter in optimizer.model_param_gbuf_map:
            extent = optimizer._get_model_param_range_map(parameter)["param"]
            start = extent.start
            states = _state_tensors_without_step(optimizer._get_main_param_and_optimizer_states(parameter))
            view = parameter.dtype == torch.float32
            # Float32 parameters are updated in place, also where the optimizer has a copy.
            if view:
                states["param"] = parameter.detach().view(-1)[extent.start : extent.end]
            yield ParameterState(parameter, start, states, main="param", main_is_view=view)
        return
    for parameter, main, start in main_parameters(optimizer):
        states = _state_tensors_without_step(state[main])
        if main is parameter:
            yield ParameterState(parameter, start, states)
        else:
            yield ParameterState(parameter, start, {**states, "fp32_param": main.detach()}, main="fp32_param")


def main_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    """Yield the main parameters that are no memory of the model, without the moments, which may be offloaded."""
    name = MAINS[0] if isinstance(optimizer, DistributedOptimizer) else MAINS[1]
    for parameter, main, start in main_parameters(optimizer):
        if main.dtype != parameter.dtype:
            yield ParameterState(parameter, start, {name: main.detach()}, main=name)


def _state_tensors_without_step(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among the states, without the step, which all parameters share."""
    return {name: value.detach() for name, value in states.items() if isinstance(value, Tensor) and name != "step"}


def write_back(optimizer: MegatronOptimizer, state: ParameterState) -> None:
    """Write states to a precision-aware optimizer, for which :func:`optimizer_states` returned copies."""
    if isinstance(optimizer, DistributedOptimizer) and optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        optimizer._set_main_param_and_optimizer_states(state.parameter, state.states)


def set_step(optimizers: Iterable[MegatronOptimizer], step: int) -> None:
    """Set the number of steps in the state of optimizers.

    Torch's optimizers keep it in the state of each parameter. Those of Transformer Engine and Apex keep it in the
    parameter group, which does not have the entry before the first step.
    """
    for optimizer in optimizers:
        inner = optimizer.optimizer
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(step)
        if not isinstance(inner, (torch.optim.Adam, torch.optim.SGD)):
            for group in inner.param_groups:
                group["step"] = step


def common_state(chained: ChainedOptimizer) -> dict[Any, Any]:
    """Return the optimizer's entry in ``common.pt``: hyperparameters and the step.

    It has the form of Megatron-Core's ``sharded_state_dict``.
    """
    states: list[dict[Any, Any]] = []
    for optimizer in sub_optimizers(chained):
        if isinstance(optimizer, DistributedOptimizer):
            states.append(
                {**optimizer.state_dict(), "param_state_sharding_type": FORMAT["distrib_optim_sharding_type"]}
            )
            continue
        # The other optimizers: parameters are stored by key, so that only settings and the step remain.
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.optimizer.param_groups
        ]
        steps = [state["step"] for state in optimizer.optimizer.state.values() if "step" in state]
        common = {"param_groups": groups, "state": {"common_step": steps[0]} if steps and steps[0] else {}}
        states.append({"optimizer": common} if isinstance(optimizer, Float16OptimizerWithFloat16Params) else common)
    return states[0] if len(states) == 1 else dict(enumerate(states))


@dataclass(frozen=True)
class _NamedValues:
    """Values of a parameter or of its optimizer state on this rank, and their keys in a checkpoint.

    Attributes:
        flat: flat tensor.
        start: position of its first element in the flattened parameter.
        run_key: key for all engines, with ``{}`` for that of the weight; ``None`` if other values have it.
        core_keys: keys of Megatron-Core, with ``{}`` for that of the parameter.
    """

    flat: Tensor
    start: int
    run_key: str | None
    core_keys: tuple[str, ...]


def tensors_to_save(
    local_params: Iterable[LocalParameter],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: ModelTensors,
    optimizers: Sequence[MegatronOptimizer],
    *,
    moments: bool,
) -> dict[str, TensorBoxes]:
    """Return this rank's boxes by key, in the memory of the model and the optimizer. Padding of a vocabulary is left out.

    Args:
        local_params: parameters of this rank.
        shapes: name -> shape of the full model's Hugging Face tensors.
        tensors: tensors of the parameters in Megatron-Core's checkpoints.
        optimizers: optimizers with the main parameters.
        moments: save the moments, too, which :func:`sub_optimizers` has created.
    """
    states_of = optimizer_states if moments else main_states
    states = {state.parameter: state for optimizer in optimizers for state in states_of(optimizer)}
    sharded = moments and any(isinstance(optimizer, DistributedOptimizer) for optimizer in optimizers)
    found: dict[str, list[tuple[TensorPlace, list[TensorPlace], Tensor]]] = {}
    for local_param in local_params:
        # A tied weight is saved once.
        if local_param.tied:
            continue
        parameter = local_param.parameter
        # The weights are the main parameters, if there are any, also where other ranks have the range.
        has_main = bool(optimizers) and parameter.requires_grad and (sharded or parameter.dtype == torch.bfloat16)
        for named in _named_values(parameter, states.get(parameter), has_main):
            for piece in local_param.slices(named.flat, named.start):
                first, *others = _places(piece, named, parameter, tensors[parameter], shapes[piece.name])
                found.setdefault(first.key, []).append((first, others, piece.values))
    return {
        key: TensorBoxes(
            [(_box(first, values), values) for first, _, values in entries],
            entries[0][0].shape,
            [others for _, others, _ in entries],
        )
        for key, entries in found.items()
    }


def _named_values(parameter: nn.Parameter, state: ParameterState | None, has_main: bool) -> Iterator[_NamedValues]:
    """Yield the values of a parameter and of its optimizer state.

    Args:
        parameter: parameter of the model.
        state: its state on this rank, if any.
        has_main: whether the optimizer has a main parameter, on this or other ranks.
    """
    model = parameter.detach().view(-1)
    if not has_main:
        yield _NamedValues(model, 0, f"{MODEL}{{}}", ("{}",))
    elif parameter.dtype != torch.float32:  # a rounded copy of the main parameter
        yield _NamedValues(model, 0, None, ("{}",))
    if state is None:
        return
    for name, values in state.states.items():
        run_key, core_keys = f"{OPTIM}{{}}.{name}", [f"{OPTIMIZER}{name}.{{}}"]
        if name == state.main:
            run_key = f"{MODEL}{{}}"
            core_keys += ["{}"] if state.main_is_view else []
        yield _NamedValues(values.reshape(-1), state.start, run_key, tuple(core_keys))


def _places(
    piece: Slice, named: _NamedValues, parameter: nn.Parameter, tensors: Sequence[ShardedTensor], shape: tuple[int, ...]
) -> list[TensorPlace]:
    """Return the places of a slice in a checkpoint: by the name of its weight, and by those of Megatron-Core.

    Args:
        piece: slice of a Hugging Face tensor, in the memory of ``named``.
        named: values and their keys.
        parameter: parameter of the model.
        tensors: tensors of the parameter in Megatron-Core's checkpoints.
        shape: shape of the full Hugging Face tensor.

    Raises:
        ValueError: Megatron-Core's tensor has another form.
    """
    # Position in the storage, and the last tensor that begins before it.
    at = parameter.storage_offset() + named.start + piece.values.storage_offset() - named.flat.storage_offset()
    core = next(tensor for tensor in reversed(tensors) if tensor.data.storage_offset() <= at)
    if core.prepend_axis_num or not core.data.is_contiguous():
        raise ValueError(f"{core.key!r} has other dimensions than {piece.name!r}: it cannot be saved")
    row_and_column = divmod(at - core.data.storage_offset(), math.prod(core.local_shape[1:]))
    offsets = tuple(start + i for start, i in zip(core.global_offset, row_and_column, strict=False))
    # Padding of a vocabulary depends on the layout.
    full = shape if core.allow_shape_mismatch else tuple(core.global_shape)
    places = [TensorPlace(key.format(core.key), offsets, full) for key in named.core_keys]
    if named.run_key is not None:
        starts = tuple(bounds.start for bounds in piece.box)
        places.insert(0, TensorPlace(named.run_key.format(weight_key(piece.name)), starts, shape))
    return places


def _box(place: TensorPlace, values: Tensor) -> Box:
    return tuple(slice(start, start + size) for start, size in zip(place.offsets, values.shape, strict=True))
