"""The tensors of a Megatron-Core model and its optimizer, as a ``torch_dist`` checkpoint of Megatron-Core names and cuts them.

Optimizer state has the names and shapes of Megatron-Core's ``fully_reshardable`` format, so that it can be read in any layout, and by
``megatron.core.dist_checkpointing.load``. But where the distributed optimizer holds a stretch of a flattened parameter, Megatron-Core
gathers all of them on every rank's host before it writes. Here each rank writes and reads its own stretch, as the boxes that it covers.
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
"""With what the keys of optimizer state begin; behind it stand the state's name and the key of its parameter."""

MAINS = ("param", "fp32_param")
"""Names of the main parameters: of the distributed optimizer, and of the one that is not."""

FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}
"""What Megatron-Core is told of the format, so that keys do not depend on the layout."""

ModelTensors = dict[Tensor, list[ShardedTensor]]
"""For each tensor of a model, by identity, what it is in the checkpoint: itself, or the parts of a fused one, one behind the other."""


class SavePlanner(StagedPlanner, MCoreSavePlanner):
    """Megatron-Core's planner, which can copy what it will write."""


@torch.no_grad()
def model_tensors(chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection) -> ModelTensors:
    """The parameters and buffers of this rank's chunks."""
    tensors: ModelTensors = {}
    for chunk in chunks:
        for entry in nested_values(_sharded_state(chunk.module, groups)):
            if isinstance(entry, ShardedTensorFactory):
                tensors[entry.data] = list(nested_values(entry.build()))
            elif isinstance(entry, ShardedTensor):  # and not the empty extra state of Transformer Engine's modules
                tensors[entry.data] = [entry]
    return tensors


def _sharded_state(chunk: PackedGPT, groups: ProcessGroupCollection) -> dict[str, Any]:
    for module in chunk.modules():
        if isinstance(module, MegatronModule) and not hasattr(module, "tp_group"):
            module.tp_group = groups.tp  # otherwise it asks megatron.core.parallel_state, which is not in use
    metadata = {"dp_cp_group": groups.dp_cp, **FORMAT}
    if not (chunk.share_embeddings_and_output_weights and chunk.post_process and not chunk.pre_process):
        return chunk.sharded_state_dict(metadata=metadata)
    # A tied head on another stage than the embedding is a replica of it: said here, as Megatron-Core would ask parallel_state.
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
        parameter: the model's.
        start: where the state begins in the flattened parameter.
        main: the main parameter and its name in the checkpoint; None where it is the model's parameter, or kept within the optimizer.
        states: by name.
        split: whether data-parallel ranks hold different stretches.
        main_is_view: the main parameter is memory of the model's.
    """

    parameter: nn.Parameter
    start: int
    states: dict[str, Tensor]
    split: bool
    main: str | None = None
    main_is_view: bool = False


def sub_optimizers(chained: ChainedOptimizer) -> list[MegatronOptimizer]:
    """The optimizers with parameters on this rank, with their state made where no step has made it."""
    optimizers = [
        optimizer for optimizer in chained.chained_optimizers if not getattr(optimizer, "is_stub_optimizer", False)
    ]
    for optimizer in optimizers:
        inner = optimizer.optimizer
        if optimizer.init_state_fn is not None:
            optimizer.init_state_fn(inner, optimizer.config)
        for group in inner.param_groups:
            for main in group["params"]:
                if isinstance(inner, torch.optim.Adam):
                    inner.state[main].setdefault("step", torch.tensor(0.0))
                elif isinstance(inner, torch.optim.SGD) and group["momentum"]:
                    inner.state[main].setdefault("momentum_buffer", torch.zeros_like(main))
    return optimizers


def optimizer_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    """The state of each parameter that an optimizer updates on this rank."""
    state = optimizer.optimizer.state
    if isinstance(optimizer, DistributedOptimizer):
        for parameter in optimizer.model_param_gbuf_map:
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            states = _tensors(optimizer._get_main_param_and_optimizer_states(parameter))
            view = parameter.dtype == torch.float32
            yield ParameterState(parameter, start, states, split=True, main="param", main_is_view=view)
        return
    mains: list[tuple[nn.Parameter, Tensor, str | None]] = [(main, main, None) for main in optimizer.get_parameters()]
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        mains = [(main, main, None) for group in optimizer.fp32_from_fp32_groups for main in group]
        for models, copies in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            mains += [(parameter, main, "fp32_param") for parameter, main in zip(models, copies, strict=True)]
    for parameter, main, name in mains:
        states = _tensors(state[main])
        if name is not None:
            states[name] = main.detach()
        yield ParameterState(parameter, 0, states, split=False, main=name)


def _tensors(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Apart from the step, which all parameters share."""
    return {name: value.detach() for name, value in states.items() if isinstance(value, Tensor) and name != "step"}


def write_back(optimizer: MegatronOptimizer, state: ParameterState) -> None:
    """Put states where the optimizer keeps them, if :func:`optimizer_states` gave copies: a precision-aware optimizer's."""
    if isinstance(optimizer, DistributedOptimizer) and optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        optimizer._set_main_param_and_optimizer_states(state.parameter, state.states)


def set_step(optimizers: Iterable[MegatronOptimizer], step: int) -> None:
    """Set the number of steps that the moments come from."""
    for optimizer in optimizers:
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)
        for group in optimizer.optimizer.param_groups:
            if "step" in group:
                group["step"] = step


def common_state(chained: ChainedOptimizer) -> dict[Any, Any]:
    """What ``common.pt`` says of the optimizer: hyperparameters and the step, in the form of Megatron-Core's ``sharded_state_dict``."""
    states: list[dict[Any, Any]] = []
    for optimizer in sub_optimizers(chained):
        if isinstance(optimizer, DistributedOptimizer):
            states.append(
                {**optimizer.state_dict(), "param_state_sharding_type": FORMAT["distrib_optim_sharding_type"]}
            )
            continue
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
    """One state of a parameter, as boxes of the checkpoint's tensors, sharing its memory.

    Args:
        pieces: of the parameter. name: of the state.
        key: of the tensors in the checkpoint, with ``{}`` for the key of the piece.
    """
    flat = state.states[name].reshape(-1)
    stop = state.start + len(flat)
    for piece in tensors:
        first = piece.data.storage_offset() - state.parameter.storage_offset()
        if not piece.data.is_contiguous():
            raise ValueError(f"{piece.key!r} is no stretch of its parameter: its optimizer state cannot be saved")
        low, high = max(state.start, first), min(stop, first + piece.data.numel())
        replica = (*piece.replica_id[:2], 0) if state.split else piece.replica_id
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
    """The boxes ``(offsets, sizes)`` that make up elements ``start`` to ``stop`` of a flattened tensor, in order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,)[: len(shape)], (stop - start,)[: len(shape)]
        return
    row = math.prod(shape[1:])
    at = start // row
    if start % row or stop < start + row:  # part of one row, and then the rest
        end = min(stop, (at + 1) * row)
        for offsets, sizes in boxes(start - at * row, end - at * row, shape[1:]):
            yield (at, *offsets), (1, *sizes)
        yield from boxes(end, stop, shape)
        return
    rows = (stop - start) // row
    yield (at,) + (0,) * (len(shape) - 1), (rows, *shape[1:])
    yield from boxes(start + rows * row, stop, shape)


def tensors_to_save(tensors: Iterable[ShardedTensor]) -> dict[str, Any]:
    """What torch's planners take, by key: of replicas the first alone."""
    return mcore_to_pyt_state_dict(_by_key(t for t in tensors if is_main_replica(t.replica_id)))


def tensors_to_load(tensors: Iterable[ShardedTensor]) -> tuple[dict[str, Any], MCoreLoadPlanner]:
    """What torch's planners take, by key, to fill in place; and the planner. Tensors that may be of another size are zeroed."""
    tensors = list(tensors)
    loose = {t.key: t for t in tensors if t.allow_shape_mismatch}
    strict = [t for t in tensors if not t.allow_shape_mismatch]
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=strict,
        allow_shape_mismatch_sharded_tensors=loose,
        allow_partial_load=False,
    )
    return mcore_to_pyt_state_dict(_by_key(tensors), is_loading=True), planner


def _by_key(tensors: Iterable[ShardedTensor]) -> dict[str, list[ShardedTensor]]:
    by_key: dict[str, list[ShardedTensor]] = {}
    for tensor in tensors:
        by_key.setdefault(tensor.key, []).append(replace(tensor))  # to be written into by what takes it
    return by_key
