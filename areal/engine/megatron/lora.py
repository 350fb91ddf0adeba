"""Adapters beside Megatron-Core's parallel linear layers, which stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from transformers import PretrainedConfig

from areal.engine.lora.adapter import Adapter, AdapterLayout
from areal.engine.lora.low_rank import TensorParallelRanks, TensorParallelSplit
from areal.engine.megatron.model.layer_spec import ReplicatedLinear
from areal.engine.megatron.model.packed_gpt import PackedGPT
from areal.engine.megatron.weight_mapping import LocalParameter, local_parameters
from areal.utils.collectives import GatherRows, ReduceScatterRows
from areal.utils.distributed import ControlPlane


def megatron_adapter_layout(
    chunks: Sequence[PackedGPT], hf: PretrainedConfig, groups: ProcessGroupCollection, control: ControlPlane
) -> AdapterLayout:
    """Where adapters of a model can be. Collective.

    Args:
        chunks: of this rank. groups: of the layout.
    """
    layers = {
        key: _split(layer, groups.tp)
        for chunk in chunks
        for layer, mapped in _linears(chunk, hf)
        for key in _keys(mapped)
    }
    parameter = next(chunks[0].parameters())
    return AdapterLayout(
        layers=layers,
        layer_names=frozenset(key for names_of_rank in control.gather(list(layers)) for key in names_of_rank),
        tp=TensorParallelRanks(_group_if_shared(groups.tp)),
        replicas=[groups.dp_cp] if groups.dp_cp.size() > 1 else [],
        device=parameter.device,
        dtype=torch.promote_types(parameter.dtype, torch.float32),
        stages=_group_if_shared(groups.pp),
    )


def attach_megatron_adapters(
    chunks: Sequence[PackedGPT], hf: PretrainedConfig, active: Callable[[], Adapter | None]
) -> None:
    """Let every linear layer of the decoder add what the active adapter has for it, in place."""
    for chunk in chunks:
        for layer, mapped in _linears(chunk, hf):
            layer.forward = _AdaptedForward(layer.forward, mapped, active)


class _AdaptedForward:
    """The forward of a layer whose outputs are those of one Hugging Face layer, or of several in turns."""

    def __init__(self, inner: Callable[..., Any], mapped: LocalParameter, active: Callable[[], Adapter | None]) -> None:
        self._inner, self._active = inner, active
        self._keys = _keys(mapped)
        columns = [
            torch.cat([_indices(rows.start, rows.box[0]) for rows in mapped.mapped_rows if rows.name == name])
            for name in mapped.names
        ]
        self._columns = [x.to(mapped.parameter.device) for x in columns]
        self._back = torch.cat(columns).argsort().to(mapped.parameter.device)

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self._inner(x, *args, **options)
        adapter = self._active()
        pairs = [None if adapter is None else adapter.pairs.get(key) for key in self._keys]
        if not any(pairs):
            return out, bias
        if len(pairs) == 1 and pairs[0] is not None:
            return pairs[0].apply(out, x), bias
        pieces = [out.index_select(-1, columns) for columns in self._columns]
        added = [piece if pair is None else pair.apply(piece, x) for piece, pair in zip(pieces, pairs, strict=True)]
        return torch.cat(added, -1).index_select(-1, self._back), bias


def _linears(chunk: PackedGPT, hf: PretrainedConfig) -> Iterator[tuple[Any, LocalParameter]]:
    """The output head is none of them: it is multiplied with outside its own forward."""
    for mapped in local_parameters(chunk, hf):
        owner, _, kind = mapped.name.rpartition(".")
        layer = chunk.get_submodule(owner)
        is_linear = isinstance(layer, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear)
        if kind == "weight" and is_linear and layer is not getattr(chunk, "output_layer", None):
            yield layer, mapped


def _keys(mapped: LocalParameter) -> list[str]:
    return [name.removesuffix(".weight") for name in mapped.names]


def _split(layer: Any, tp: dist.ProcessGroup) -> TensorParallelSplit:
    if tp.size() == 1:
        return TensorParallelSplit()
    if isinstance(layer, ReplicatedLinear):
        own_tokens: bool = layer.weight.sequence_parallel  # type: ignore[attr-defined]
        return TensorParallelSplit(down_summed=own_tokens, up_summed=own_tokens)
    if isinstance(layer, ColumnParallelLinear):
        if layer.sequence_parallel:
            return TensorParallelSplit(up_dim=0, down_summed=True, before_up=lambda low: GatherRows.apply(low, tp))
        return TensorParallelSplit(
            up_dim=0, down_summed=True, before_down=lambda x: copy_to_tensor_model_parallel_region(x, group=tp)
        )
    if layer.sequence_parallel:
        return TensorParallelSplit(down_dim=1, up_summed=True, before_up=lambda low: ReduceScatterRows.apply(low, tp))
    return TensorParallelSplit(
        down_dim=1, before_up=lambda low: reduce_from_tensor_model_parallel_region(low, group=tp)
    )


def _indices(start: int, rows: slice) -> Tensor:
    return torch.arange(start, start + rows.stop - rows.start)


def _group_if_shared(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if group.size() > 1 else None
