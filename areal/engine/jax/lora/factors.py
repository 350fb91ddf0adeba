"""The factors of adapters, which are torch parameters, as the inputs of a JAX program.

Each forward gets the factors of its adapters, stacked: a slot for each adapter, and a row for each layer of a kind. Sizes are
rounded up to powers of two, so that few different programs are compiled. Arrays have an axis over streams: each process passes the
factors of its samples for all of its streams, and sums their gradients, without a sum over processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
import torch
import torch.distributed as dist
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal.engine.jax.inputs import Sizes, power_of_two
from areal.engine.jax.lora.contribution import DOWN, UP
from areal.engine.jax.mesh import STREAMS, distinct_shards, to_numpy, to_torch, ways
from areal.engine.jax.model.architecture import stacked_name
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.lora.adapter import Adapter, AdapterLayout
from areal.engine.lora.adapter_plan import decoder_linears, head_name
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.lora.low_rank import TensorParallelRanks, TensorParallelSplit
from areal.engine.stream.layout import AdapterRuns


def jax_adapter_layout(
    hf: PreTrainedModel, replicas: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> AdapterLayout:
    """Return the placement of adapters of a model: replicated on all ranks.

    Args:
        hf: the model of transformers on the meta device.
        replicas: process group of the data-parallel ranks.
        device: device of the factors.
        dtype: master dtype of the model.
    """
    layers = {name: TensorParallelSplit() for name in _linears(hf)}
    return AdapterLayout(
        layers=layers,
        layer_names=frozenset(layers),
        # Context- and tensor-parallel ranks have equal gradients: the partitioner has summed them.
        tp=TensorParallelRanks(),
        replicas=[replicas] if replicas.size() > 1 else [],
        device=device,
        dtype=torch.promote_types(dtype, torch.float32),
    )


@dataclass(frozen=True)
class _StackShape:
    """Sizes of stacked factors, which are the same on all ranks: slots, rank, and kinds of layers."""

    slots: int
    rank: int
    kinds: frozenset[str]


@dataclass(frozen=True)
class _Kind:
    """Linear layers of one kind: their number, or ``None`` for a layer outside of the stack, and their features."""

    rows: int | None
    outputs: int
    inputs: int


@dataclass(frozen=True)
class _Place:
    """Place of a torch parameter in a stacked array, and the factor by which it is multiplied there."""

    parameter: nn.Parameter
    array: str
    index: tuple[int | slice, ...]
    scale: float


class StackedFactors:
    """The factors of one forward.

    Args:
        arrays: stacked factors by name: ``[L, D, S, r, in]`` and ``[L, D, out, S, r]``, without ``L`` for a layer outside of the stack.
        places: the torch parameters in them.
    """

    def __init__(self, arrays: Mapping[str, Array], places: Sequence[_Place]) -> None:
        self.arrays, self._places = arrays, places
        self.parameters = [place.parameter for place in places]

    def gradients(self, arrays: Mapping[str, Array]) -> list[Tensor]:
        """Return the gradients of :attr:`parameters` from those of :attr:`arrays`: sums over the streams of this process."""
        local = {name: _summed([to_torch(shard) for _, shard in distinct_shards(x)]) for name, x in arrays.items()}
        found = []
        for place in self._places:
            gradient = local[place.array][place.index]
            gradient = gradient if place.scale == 1 else gradient * place.scale
            found.append(gradient.to(place.parameter.device))
        return found


class FactorStacks:
    """Stacks the factors of a model's adapters.

    Args:
        spec: the model.
        hf: the model of transformers on the meta device.
        adapters: the adapters.
    """

    def __init__(self, spec: ModelSpec, hf: PreTrainedModel, adapters: AdapterSet) -> None:
        self._spec, self._adapters = spec, adapters
        # Kind and row of each layer.
        self._layers: dict[str, tuple[str, int | None]] = {}
        self._kinds: dict[str, _Kind] = {}
        for name, linear in _linears(hf).items():
            kind = stacked_name(name)
            stacked = kind != name
            row = self._kinds[kind].rows or 0 if kind in self._kinds else 0
            self._layers[name] = kind, row if stacked else None
            self._kinds[kind] = _Kind(row + 1 if stacked else None, linear.out_features, linear.in_features)
        self._last: tuple[object, StackedFactors] | None = None

    def stack(self, runs: AdapterRuns | None, sizes: Sizes) -> StackedFactors:
        """Return the factors of a forward: zeros inside ``reference()``, which runs the same program.

        The last ones are kept: micro-batches of a call often have the same adapters.

        Args:
            runs: runs of rows with one adapter; ``None`` for the selected adapter.
            sizes: largest sizes of all ranks.
        """
        names: Iterable[str] = (self._adapters.selected,) if runs is None else sizes.adapters
        # The program of several adapters does not depend on which they are; that of one does not depend on the others.
        if len(sizes.adapters) > 1:
            names = self._adapters.names
        targets = [target for name in names for target in self._adapters[name].plan.targets]
        kinds = frozenset(self._layers[target.key][0] for target in targets)
        shape = _StackShape(sizes.slots, power_of_two(max(target.rank for target in targets)), kinds)
        adapters = tuple(self._adapters.active(runs).values())
        key = shape, tuple((adapter, adapter.version) for adapter in adapters)
        if self._last is None or self._last[0] != key:
            self._last = key, self._stacked(adapters, shape)
        return self._last[1]

    def _stacked(self, adapters: Sequence[Adapter], shape: _StackShape) -> StackedFactors:
        arrays = {
            name: np.zeros(dimensions, self._spec.numbers.updates)
            for kind in sorted(shape.kinds)
            for name, dimensions in self._shapes(kind, shape)
        }
        places = list(self._places(adapters))
        for place in places:
            arrays[place.array][place.index] = to_numpy(place.parameter) * place.scale
        return StackedFactors({name: self._placed(name, x) for name, x in arrays.items()}, places)

    def _shapes(self, kind: str, shape: _StackShape) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names of the arrays of a kind of layers, and their shapes for one stream."""
        info = self._kinds[kind]
        rows = () if info.rows is None else (info.rows,)
        return [
            (f"{kind}.{DOWN}", (*rows, 1, shape.slots, shape.rank, info.inputs)),
            (f"{kind}.{UP}", (*rows, 1, info.outputs, shape.slots, shape.rank)),
        ]

    def _places(self, adapters: Sequence[Adapter]) -> Iterable[_Place]:
        for slot, adapter in enumerate(adapters):
            for key, pair in adapter.pairs.items():
                (kind, row), ranks = self._layers[key], slice(pair.target.rank)
                rows = () if row is None else (row,)
                yield _Place(pair.down.parameter, f"{kind}.{DOWN}", (*rows, 0, slot, ranks), 1.0)
                yield _Place(pair.up.parameter, f"{kind}.{UP}", (*rows, 0, slice(None), slot, ranks), pair.scale)

    def _placed(self, name: str, values: np.ndarray) -> Array:
        """Return the array of all streams, of which those of this process have ``values``."""
        sharding = factor_sharding(self._spec, values.ndim)
        axis = values.ndim - 4
        shape = (*values.shape[:axis], ways(self._spec.mesh, STREAMS), *values.shape[axis + 1 :])
        with self._spec.numbers.enabled():
            return jax.make_array_from_callback(shape, sharding, lambda _: values)


def factor_sharding(spec: ModelSpec, n_dims: int) -> NamedSharding:
    """Return the placement of stacked factors: each stream has its own, in full."""
    return NamedSharding(spec.mesh, PartitionSpec(*[None] * (n_dims - 4), STREAMS))


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    first, *others = tensors
    for other in others:
        first += other.to(first.device)
    return first


def _linears(hf: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers that may have an adapter, by name: those of the decoder, and the output head."""
    head = head_name(hf)
    return decoder_linears(hf) | ({} if head is None else {head: hf.get_submodule(head)})
