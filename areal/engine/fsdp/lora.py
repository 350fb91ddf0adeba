"""Adapters on the linear layers of a sharded model, whose weights do not change."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from areal.engine.fsdp.activation_checkpointing import RecomputedForward
from areal.engine.fsdp.parallelize import transformer_layers
from areal.engine.lora.adapter import AdapterLayout
from areal.engine.lora.adapter_plan import decoder_linears, head_name
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.lora.low_rank import HEAD_SPLIT, LowRank, TensorParallelRanks, TensorParallelSplit
from areal.engine.lora.mixed import MixedLowRank
from areal.engine.stream.layout import AdapterRuns
from areal.engine.torch.model_chunks import ModelChunks
from areal.utils.collectives import ReduceScatterRows


def fsdp_adapter_layout(chunks: ModelChunks, mesh: DeviceMesh, device: torch.device) -> AdapterLayout:
    """Return the placement of adapters of a model.

    Args:
        chunks: model sharded over ``mesh``.
        mesh: mesh from :func:`areal.utils.mesh.build_param_mesh`.
        device: device of the factors.
    """
    # Axes with one rank do not need communication. The first axis is the pipeline, which has its own group.
    _, *replicas, tp = (mesh.get_group(axis) if mesh.size(axis) > 1 else None for axis in range(mesh.ndim))
    dtype = next(chunks.parameters()).dtype
    linears = {name: linear for chunk in chunks for name, linear in decoder_linears(chunk.hf).items()}
    head = _head_name(chunks)
    heads = {head: HEAD_SPLIT} if head is not None and any(chunk.has_head for chunk in chunks) else {}
    return AdapterLayout(
        layers={name: _tensor_parallel_split(linear, tp) for name, linear in linears.items()} | heads,
        layer_names=frozenset({*decoder_linears(chunks.full_model.hf), *([head] if head else [])}),
        tp=TensorParallelRanks(tp),
        replicas=[group for group in replicas if group is not None],
        device=device,
        dtype=torch.promote_types(dtype, torch.float32),  # train in float32 or wider
        stages=chunks.group,
    )


def attach_fsdp_adapters(chunks: ModelChunks, adapters: AdapterSet) -> None:
    """Make every linear layer of the decoder and the head add the output of the adapters of a forward, in place."""
    head = _head_name(chunks)
    for chunk in chunks:
        if head is not None and chunk.has_head:
            chunk.head_update = functools.partial(adapters.head_update, head)
        slots = _ChunkSlots(adapters)
        for name, linear in decoder_linears(chunk.hf).items():
            # The slot of each layer is bound to its forward; a hook fills the slots before each forward of the
            # chunk.
            linear.forward = _with_adapter(linear.forward, slots.add(name))
        chunk.register_forward_pre_hook(lambda _chunk, inputs, slots=slots: slots.fill(inputs[0].adapters))
        embedding = chunk.hf.get_input_embeddings()
        if embedding is not None:
            embedding.register_forward_hook(slots.differentiate)
        for layer in transformer_layers(chunk):
            if isinstance(layer.forward, RecomputedForward):
                layer.forward.remember.append(slots.remember)


def _head_name(chunks: ModelChunks) -> str | None:
    """Return the name of a head that may have an adapter."""
    return head_name(chunks.full_model.hf) if chunks.full_model.head_is_linear else None


class _AdapterSlot:
    """Current factors of one linear layer.

    Layers do not look factors up by name: a compiled graph would contain the name of one layer and fit no other.
    """

    pair: LowRank | MixedLowRank | None = None


class _ChunkSlots:
    """The slots of the layers of a chunk. They have the factors of one micro-batch."""

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters
        self._slots: dict[str, _AdapterSlot] = {}
        self._runs: AdapterRuns | None = None

    def add(self, name: str) -> _AdapterSlot:
        """Add the slot of a layer."""
        self._slots[name] = _AdapterSlot()
        return self._slots[name]

    def fill(self, runs: AdapterRuns | None) -> None:
        """Fill all slots for a forward; ``None`` for the selected adapter."""
        pairs, self._runs = self._adapters.applied(runs), runs
        for name, slot in self._slots.items():
            slot.pair = pairs.get(name)

    def differentiate(self, _: nn.Module, inputs: Any, embedded: Tensor) -> None:
        """Let the backward of samples that name adapters reach the first layer, in place, whichever layers these adapters have.

        Ranks gather layers and exchange rows in the order of the backward, and each has samples of other adapters.
        """
        if self._runs is not None and torch.is_grad_enabled():
            embedded.requires_grad_()

    def remember(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return a function that fills the slots as now. A pipeline recomputes a layer after the forward of a later micro-batch."""
        runs = self._runs

        @contextlib.contextmanager
        def restore() -> Iterator[None]:
            if self._runs is not runs:
                self.fill(runs)
            yield

        return restore


def _with_adapter(inner: Callable[[Tensor], Tensor], slot: _AdapterSlot) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out = inner(x)
        return out if slot.pair is None else slot.pair.apply(out, x)

    return forward


def _tensor_parallel_split(linear: Any, tp: dist.ProcessGroup | None) -> TensorParallelSplit:
    weight = linear.weight
    placement = weight.placements[-1] if tp is not None and isinstance(weight, DTensor) else None
    # A replicated layer of which each rank computes some rows, with replicated factors.
    computed_rows = getattr(linear, "computed_rows", None)
    if computed_rows is not None:
        return TensorParallelSplit(
            down_summed=True, up_summed=True, up_rows=computed_rows, saved_input=linear.input_tokens.saved
        )
    if not isinstance(placement, Shard):
        return TensorParallelSplit()
    # Column-parallel: a rank computes some outputs of all tokens.
    if placement.dim == 0:
        return TensorParallelSplit(up_dim=0, down_summed=True, saved_input=linear.input_tokens.saved)
    # Row-parallel: a rank has some inputs of all tokens, and keeps its own tokens of the sum.
    return TensorParallelSplit(down_dim=1, up_summed=True, before_up=lambda low: ReduceScatterRows.apply(low, tp))
