"""Adapters on Megatron-Core's parallel linear layers, whose weights do not change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from areal.engine.lora.adapter import AdapterLayout
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.lora.low_rank import HEAD_SPLIT, LowRank, TensorParallelRanks, TensorParallelSplit
from areal.engine.lora.mixed import MixedLowRank
from areal.engine.megatron.model.layer_spec import ReplicatedLinear
from areal.engine.megatron.model.packed_gpt import PackedGPT
from areal.engine.megatron.weight_mapping import LocalParameter, local_parameters
from areal.engine.stream.layout import AdapterRuns
from areal.utils.collectives import GatherRows, ReduceScatterRows
from areal.utils.distributed import ControlPlane

HEAD = "lm_head"
"""Name of the output head in the Hugging Face models that this engine builds."""


def megatron_adapter_layout(
    chunks: Sequence[PackedGPT], hf: PretrainedConfig, groups: ProcessGroupCollection, control: ControlPlane
) -> AdapterLayout:
    """Return the placement of adapters of a model. Collective.

    Args:
        chunks: model chunks of this rank.
        hf: configuration of the Hugging Face model.
        groups: process groups of the layout.
        control: control plane over all ranks.
    """
    # A fused layer has one adapter for each of its Hugging Face layers.
    layers = {
        key: _tensor_parallel_split(layer, groups.tp)
        for chunk in chunks
        for layer, mapped in _linears(chunk, hf)
        for key in _layer_names(mapped)
    }
    # A rank whose rows of the vocabulary are all padding cannot take part in the head's adapter.
    padding = -hf.vocab_size % groups.tp.size()
    if any(chunk.post_process for chunk in chunks) and padding * groups.tp.size() < hf.vocab_size + padding:
        layers[HEAD] = HEAD_SPLIT
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


def attach_megatron_adapters(chunks: Sequence[PackedGPT], hf: PretrainedConfig, adapters: AdapterSet) -> None:
    """Make every linear layer of the decoder and the head add the output of the adapters of a forward, in place."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.head_update = functools.partial(adapters.head_update, HEAD)
        # Recomputation calls the layers again, with the arguments of the micro-batch.
        applied = _AppliedAdapters(adapters)
        chunk.register_forward_pre_hook(applied.before_forward)
        for block in chunk.decoder.layers:
            block.register_forward_pre_hook(applied.before_layer, with_kwargs=True)
        for layer, mapped in _linears(chunk, hf):
            layer.forward = _AdaptedForward(layer.forward, mapped, applied)


class _AppliedAdapters:
    """The factors that the layers of a chunk apply to the micro-batch in their current forward."""

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters
        self._runs: AdapterRuns | None = None
        self.pairs: Mapping[str, LowRank | MixedLowRank] = {}

    def before_forward(self, *_: Any) -> None:
        """Forget the micro-batch: its adapters may have changed since the last forward. Hook of the chunk."""
        self._runs = None

    def before_layer(self, _layer: Any, _args: Any, options: Mapping[str, Any]) -> None:
        """Select the factors. Hook before each forward of a layer."""
        runs = getattr(options.get("packed_seq_params"), "adapters", None)
        # One table for all layers of a micro-batch with several adapters.
        if runs is None or runs is not self._runs:
            self.pairs, self._runs = self._adapters.applied(runs), runs


class _AdaptedForward:
    """Forward of a layer whose output columns belong to one Hugging Face layer, or to several in alternation."""

    def __init__(self, inner: Callable[..., Any], mapped: LocalParameter, applied: _AppliedAdapters) -> None:
        self._inner, self._applied = inner, applied
        self._layer_names = _layer_names(mapped)
        # Output columns of each Hugging Face layer, and the permutation back to Megatron-Core's order.
        columns = [
            torch.cat([_indices(rows.start, rows.box[0]) for rows in mapped.mapped_rows if rows.name == name])
            for name in mapped.names
        ]
        self._columns = [x.to(mapped.parameter.device) for x in columns]
        self._back = torch.cat(columns).argsort().to(mapped.parameter.device)

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self._inner(x, *args, **options)
        pairs = [self._applied.pairs.get(key) for key in self._layer_names]
        # No adapter for this layer, or a single Hugging Face layer: nothing to permute.
        if not any(pairs):
            return out, bias
        if len(pairs) == 1 and pairs[0] is not None:
            return pairs[0].apply(out, x), bias
        # A fused layer: split the output by Hugging Face layer, add each contribution, and merge.
        pieces = [out.index_select(-1, columns) for columns in self._columns]
        added = [piece if pair is None else pair.apply(piece, x) for piece, pair in zip(pieces, pairs, strict=True)]
        return torch.cat(added, -1).index_select(-1, self._back), bias


def _linears(chunk: PackedGPT, hf: PretrainedConfig) -> Iterator[tuple[Any, LocalParameter]]:
    """Yield the adaptable linear layers.

    The output head is not one of them, because its weight is used outside its forward.
    """
    for mapped in local_parameters(chunk, hf):
        owner, _, kind = mapped.name.rpartition(".")
        layer = chunk.get_submodule(owner)
        is_linear = isinstance(layer, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear)
        if kind == "weight" and is_linear and layer is not getattr(chunk, "output_layer", None):
            yield layer, mapped


def _layer_names(mapped: LocalParameter) -> list[str]:
    return [name.removesuffix(".weight") for name in mapped.names]


def _tensor_parallel_split(layer: Any, tp: dist.ProcessGroup) -> TensorParallelSplit:
    if tp.size() == 1:
        return TensorParallelSplit()
    # Replicated weights: with sequence parallelism each rank has only its own tokens.
    if isinstance(layer, ReplicatedLinear):
        own_tokens: bool = layer.weight.sequence_parallel  # type: ignore[attr-defined]
        return TensorParallelSplit(down_summed=own_tokens, up_summed=own_tokens)
    # Column-parallel: tokens are gathered or replicated, and B is split like the layer.
    if isinstance(layer, ColumnParallelLinear):
        if layer.sequence_parallel:
            return TensorParallelSplit(up_dim=0, down_summed=True, before_up=lambda low: GatherRows.apply(low, tp))
        return TensorParallelSplit(
            up_dim=0, down_summed=True, before_down=lambda x: copy_to_tensor_model_parallel_region(x, group=tp)
        )
    # Row-parallel: A is split like the layer, and its partial products are summed before B.
    if layer.sequence_parallel:
        return TensorParallelSplit(down_dim=1, up_summed=True, before_up=lambda low: ReduceScatterRows.apply(low, tp))
    return TensorParallelSplit(
        down_dim=1, before_up=lambda low: reduce_from_tensor_model_parallel_region(low, group=tp)
    )


def _indices(start: int, rows: slice) -> Tensor:
    return torch.arange(start, start + rows.stop - rows.start)


def _group_if_shared(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if group.size() > 1 else None
