"""Tensors of a Megatron-Core model and its optimizer, named and sharded as in Megatron-Core's ``torch_dist``
checkpoints.

Optimizer state has the names and shapes of the ``fully_reshardable`` format, so that any layout and
``megatron.core.dist_checkpointing.load`` can read it. Each rank of the distributed optimizer has a contiguous range
of a flattened parameter. Megatron-Core gathers all ranges on every rank's host before writing. Here each rank reads
and writes only its own range, as the boxes that the range covers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from areal.engine.checkpoint.dcp import StagedPlanner
from areal.engine.megatron.model.packed_gpt import PackedGPT

OPTIMIZER = "optimizer.state."
"""Prefix of the keys of optimizer state, followed by the name of the state and the key of the parameter."""

MAINS = ("param", "fp32_param")
"""Names of main parameters: with a distributed optimizer, and without."""

FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}
"""Metadata of the format for Megatron-Core, chosen so that keys do not depend on the layout."""

ModelTensors = dict[Tensor, list[ShardedTensor]]
"""For each tensor of a model, by identity, its tensors in the checkpoint: one, or the components of a fused tensor in
order.
"""


class SavePlanner(StagedPlanner, MCoreSavePlanner):
    """Megatron-Core's planner, extended by copying the data to write."""


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
    # A tied head on another stage is a replica of the embedding. Megatron-Core would query parallel_state for that,
    # so that the head is saved as untied and then renamed.
    chunk.share_embeddings_and_output_weights = False
    try:
        state = chunk.sharded_state_dict(metadata=metadata)
    finally:
        chunk.share_embeddings_and_output_weights = True
    head = state["output_layer.weight"]
    head.key, head.replica_id = "embedding.word_embeddings.weight", (1, *head.replica_id[1:])
    return state


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of a parameter on this rank.

    Attributes:
        parameter: parameter of the model.
        start: position of the state in the flattened parameter.
        states: flat tensors by name.
        split: whether data-parallel ranks have different ranges.
        main: name of the main parameter in the checkpoint; ``None`` if it is the model's parameter or private to
            the optimizer.
        main_is_view: whether the main parameter is memory of the model.
    """

    parameter: nn.Parameter
    start: int
    states: dict[str, Tensor]
    split: bool
    main: str | None = None
    main_is_view: bool = False


def sub_optimizers(chained: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers with parameters on this rank. Missing state is created."""
    optimizers = [
        optimizer for optimizer in chained.chained_optimizers if not getattr(optimizer, "is_stub_optimizer", False)
    ]
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
            yield ParameterState(parameter, start, states, split=True, main="param", main_is_view=view)
        return
    # Without main parameters, the optimizer updates the model's parameters.
    mains: list[tuple[nn.Parameter, Tensor, str | None]] = [(main, main, None) for main in optimizer.get_parameters()]
    # In bf16 runs, pair each parameter with its float32 main parameter.
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        mains = [(main, main, None) for group in optimizer.fp32_from_fp32_groups for main in group]
        for models, copies in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            mains += [(parameter, main, "fp32_param") for parameter, main in zip(models, copies, strict=True)]
    for parameter, main, name in mains:
        states = _state_tensors_without_step(state[main])
        if name is not None:
            states[name] = main.detach()
        yield ParameterState(parameter, 0, states, split=False, main=name)


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


def state_tensors(
    state: ParameterState, tensors: Sequence[ShardedTensor], name: str, key: str
) -> Iterator[ShardedTensor]:
    """Yield one state of a parameter as boxes of the checkpoint's tensors, sharing its memory.

    Args:
        state: states of the parameter.
        tensors: tensors of the parameter in the checkpoint.
        name: name of the state.
        key: key of the state in the checkpoint, with ``{}`` for the key of the parameter.
    """
    flat = state.states[name].reshape(-1)
    stop = state.start + len(flat)
    for piece in tensors:
        # Position of this tensor in the flattened parameter, and its overlap with the range of the state.
        first = piece.data.storage_offset() - state.parameter.storage_offset()
        if not piece.data.is_contiguous():
            raise ValueError(f"{piece.key!r} is no stretch of its parameter: its optimizer state cannot be saved")
        low, high = max(state.start, first), min(stop, first + piece.data.numel())
        # Data-parallel ranks with different ranges are not replicas of each other.
        replica = (*piece.replica_id[:2], 0) if state.split else piece.replica_id
        # A range of a flattened tensor is a few boxes: partial rows at the ends, full rows between.
        for offsets, sizes in boxes(low - first, high - first, piece.local_shape):
            size = math.prod(sizes)
            n_lead = piece.prepend_axis_num
            lead, corner = piece.global_offset[:n_lead], piece.global_offset[n_lead:]
            shape = ((1,) * len(lead)) + sizes
            yield ShardedTensor(
                key.format(piece.key),
                flat[low - state.start : low - state.start + size].view(shape),
                flat.dtype,
                shape,
                piece.global_shape,
                (*lead, *(start + offset for start, offset in zip(corner, offsets, strict=True))),
                axis_fragmentations=None,
                replica_id=replica,
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )
            low += size


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes ``(offsets, sizes)`` that cover elements ``start`` to ``stop`` of a flattened tensor, in order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,)[: len(shape)], (stop - start,)[: len(shape)]
        return
    row = math.prod(shape[1:])
    at = start // row
    if start % row or stop < start + row:  # a partial row, then the rest
        end = min(stop, (at + 1) * row)
        for offsets, sizes in boxes(start - at * row, end - at * row, shape[1:]):
            yield (at, *offsets), (1, *sizes)
        yield from boxes(end, stop, shape)
        return
    # Full rows are one box.
    rows = (stop - start) // row
    yield (at,) + (0,) * (len(shape) - 1), (rows, *shape[1:])
    yield from boxes(start + rows * row, stop, shape)


def tensors_to_save(tensors: Iterable[ShardedTensor]) -> dict[str, Any]:
    """Return the tensors for torch's planner, by key. Of replicas only the first is saved."""
    return mcore_to_pyt_state_dict(_group_by_key(t for t in tensors if is_main_replica(t.replica_id)))


def tensors_to_load(tensors: Iterable[ShardedTensor]) -> tuple[dict[str, Any], MCoreLoadPlanner]:
    """Return the tensors for torch's planner to fill in place, by key, and the planner.

    Tensors whose shape may differ are zeroed.
    """
    tensors = list(tensors)
    # Padding may differ between layouts: shapes of padded tensors are not compared.
    loose = {t.key: t for t in tensors if t.allow_shape_mismatch}
    strict = [t for t in tensors if not t.allow_shape_mismatch]
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=strict,
        allow_shape_mismatch_sharded_tensors=loose,
        allow_partial_load=False,
    )
    return mcore_to_pyt_state_dict(_group_by_key(tensors), is_loading=True), planner


def _group_by_key(tensors: Iterable[ShardedTensor]) -> dict[str, list[ShardedTensor]]:
    by_key: dict[str, list[ShardedTensor]] = {}
    for tensor in tensors:
        by_key.setdefault(tensor.key, []).append(replace(tensor))  # a copy, because the planner modifies it
    return by_key
