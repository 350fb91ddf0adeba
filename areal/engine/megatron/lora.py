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
from areal.engine.megatron.model.layer_spec import WholeLinear
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
    sites = {
        key: _share(layer, groups.tp) for chunk in chunks for layer, held in _linears(chunk, hf) for key in _keys(held)
    }
    parameter = next(chunks[0].parameters())
    return AdapterLayout(
        sites=sites,
        keys=frozenset(key for theirs in control.gather(list(sites)) for key in theirs),
        tp=TensorParallelRanks(_or_none(groups.tp)),
        replicas=[groups.dp_cp] if groups.dp_cp.size() > 1 else [],
        device=parameter.device,
        dtype=torch.promote_types(parameter.dtype, torch.float32),
        stages=_or_none(groups.pp),
    )


def attach_megatron_adapters(
    chunks: Sequence[PackedGPT], hf: PretrainedConfig, active: Callable[[], Adapter | None]
) -> None:
    """Let every linear layer of the decoder add what the active adapter has for it, in place."""
    for chunk in chunks:
        for layer, held in _linears(chunk, hf):
            layer.forward = _Adapted(layer.forward, held, active)


class _Adapted:
    """The forward of a layer whose outputs are those of one Hugging Face layer, or of several in turns."""

    def __init__(self, inner: Callable[..., Any], held: LocalParameter, active: Callable[[], Adapter | None]) -> None:
        self._inner, self._active = inner, active
        self._keys = _keys(held)
        columns = [
            torch.cat([_range(part.start, part.box[0]) for part in held.parts if part.name == name])
            for name in held.names
        ]
        self._columns = [x.to(held.parameter.device) for x in columns]
        self._back = torch.cat(columns).argsort().to(held.parameter.device)

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self._inner(x, *args, **options)
        adapter = self._active()
        pairs = [None if adapter is None else adapter.pairs.get(key) for key in self._keys]
        if not any(pairs):
            return out, bias
        if len(pairs) == 1 and pairs[0] is not None:
            return pairs[0].added_to(out, x), bias
        pieces = [out.index_select(-1, columns) for columns in self._columns]
        added = [piece if pair is None else pair.added_to(piece, x) for piece, pair in zip(pieces, pairs, strict=True)]
        return torch.cat(added, -1).index_select(-1, self._back), bias


def _linears(chunk: PackedGPT, hf: PretrainedConfig) -> Iterator[tuple[Any, LocalParameter]]:
    """The output head is none of them: it is multiplied with outside its own forward."""
    for held in local_parameters(chunk, hf):
        owner, _, kind = held.name.rpartition(".")
        layer = chunk.get_submodule(owner)
        is_linear = isinstance(layer, ColumnParallelLinear | RowParallelLinear | WholeLinear)
        if kind == "weight" and is_linear and layer is not getattr(chunk, "output_layer", None):
            yield layer, held


def _keys(held: LocalParameter) -> list[str]:
    return [name.removesuffix(".weight") for name in held.names]


def _share(layer: Any, tp: dist.ProcessGroup) -> TensorParallelSplit:
    if tp.size() == 1:
        return TensorParallelSplit()
    if isinstance(layer, WholeLinear):
        own_tokens: bool = layer.weight.sequence_parallel  # type: ignore[attr-defined]
        return TensorParallelSplit(down_summed=own_tokens, up_summed=own_tokens)
    if isinstance(layer, ColumnParallelLinear):
        if layer.sequence_parallel:
            return TensorParallelSplit(up_cut=0, down_summed=True, between=lambda low: GatherRows.apply(low, tp))
        return TensorParallelSplit(
            up_cut=0, down_summed=True, enter=lambda x: copy_to_tensor_model_parallel_region(x, group=tp)
        )
    if layer.sequence_parallel:
        return TensorParallelSplit(down_cut=1, up_summed=True, between=lambda low: ReduceScatterRows.apply(low, tp))
    return TensorParallelSplit(down_cut=1, between=lambda low: reduce_from_tensor_model_parallel_region(low, group=tp))


def _range(start: int, rows: slice) -> Tensor:
    return torch.arange(start, start + rows.stop - rows.start)


def _or_none(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if group.size() > 1 else None
