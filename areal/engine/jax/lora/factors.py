"""The factors of adapters, which are torch parameters, as the inputs of a JAX program.

Each forward gets the factors of its adapters, stacked: a slot for each adapter, and a row for each layer of a kind. Sizes are
rounded up to powers of two, so that few different programs are compiled. Arrays have an axis over data-parallel ranks: each rank
passes the factors of its samples, and gets their gradient, without a sum over ranks.
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

from areal.engine.jax.architecture import stacked_name
from areal.engine.jax.lora.low_rank import DOWN, UP
from areal.engine.jax.mesh import to_numpy, to_torch
from areal.engine.jax.model import ModelSpec
from areal.engine.lora.adapter import AdapterLayout
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.lora.low_rank import LowRank, TensorParallelRanks, TensorParallelSplit
from areal.engine.lora.plan import decoder_linears, head_name
from areal.engine.model.adapter_runs import AdapterRuns


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
        # Tensor-parallel ranks have equal gradients: the partitioner has summed them.
        tp=TensorParallelRanks(),
        replicas=[replicas] if replicas.size() > 1 else [],
        device=device,
        dtype=torch.promote_types(dtype, torch.float32),
    )


@dataclass(frozen=True)
class FactorSizes:
    """Sizes of the stacked factors of one rank. Ranks take the largest of each, and so run the same program.

    Attributes:
        slots: adapters.
        rank: largest rank of an adapter.
        kinds: kinds of layers that one of the adapters has.
    """

    slots: int = 0
    rank: int = 0
    kinds: frozenset[str] = frozenset()

    @classmethod
    def largest(cls, sizes: Iterable[FactorSizes]) -> FactorSizes:
        """Return the largest sizes, and all kinds."""
        everyone = list(sizes)
        kinds = frozenset[str]().union(*(each.kinds for each in everyone))
        return cls(max(each.slots for each in everyone), max(each.rank for each in everyone), kinds)


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
        """Return the gradients of :attr:`parameters` of this rank from those of :attr:`arrays`."""
        local = {name: to_torch(x.addressable_data(0)) for name, x in arrays.items()}
        found = []
        for place in self._places:
            gradient = local[place.array][place.index]
            gradient = gradient if place.scale == 1 else gradient * place.scale
            found.append(gradient.to(place.parameter.device))
        return found


class ForwardFactors:
    """The adapters of one forward on this rank.

    Args:
        adapters: factors by layer, of each adapter.
        owner: stacks the factors.
    """

    def __init__(self, adapters: Sequence[Mapping[str, LowRank]], owner: FactorStacks) -> None:
        self._adapters, self._owner = adapters, owner
        pairs = [pair for by_layer in adapters for pair in by_layer.values()]
        self.sizes = FactorSizes(
            _power_of_two(len(adapters)),
            _power_of_two(max((pair.target.rank for pair in pairs), default=0)),
            frozenset(stacked_name(pair.target.key) for pair in pairs),
        )

    def stack(self, sizes: FactorSizes) -> StackedFactors:
        """Return the factors, padded by zeros to ``sizes``."""
        return self._owner.stack(self._adapters, sizes)


class FactorStacks:
    """Stacks the factors of a model's adapters.

    Args:
        spec: the model.
        hf: the model of transformers on the meta device.
        adapters: the adapters.
    """

    def __init__(self, spec: ModelSpec, hf: PreTrainedModel, adapters: AdapterSet) -> None:
        self._spec, self._adapters = spec, adapters
        self._rows: dict[str, int | None] = {}
        self._kinds: dict[str, _Kind] = {}
        for name, linear in _linears(hf).items():
            kind = stacked_name(name)
            stacked = kind != name
            row = self._kinds[kind].rows or 0 if kind in self._kinds else 0
            self._rows[name] = row if stacked else None
            self._kinds[kind] = _Kind(row + 1 if stacked else None, linear.out_features, linear.in_features)
        self._last: tuple[object, StackedFactors] | None = None

    def of(self, runs: AdapterRuns | None) -> ForwardFactors:
        """Return the adapters of a forward: none inside ``reference()``.

        Args:
            runs: runs of rows with one adapter; ``None`` for the selected adapter.
        """
        return ForwardFactors(list(self._adapters.applied_by_name(runs).values()), self)

    def stack(self, adapters: Sequence[Mapping[str, LowRank]], sizes: FactorSizes) -> StackedFactors:
        """Return the stacked factors of adapters. They are kept until other factors are wanted, or values change."""
        pairs = [pair for by_layer in adapters for pair in by_layer.values()]
        parameters = [factor.parameter for pair in pairs for factor in (pair.down, pair.up)]
        key = sizes, tuple((id(x), x._version) for x in parameters)
        if self._last is None or self._last[0] != key:
            self._last = key, self._stacked(adapters, sizes)
        return self._last[1]

    def _stacked(self, adapters: Sequence[Mapping[str, LowRank]], sizes: FactorSizes) -> StackedFactors:
        arrays = {
            name: np.zeros(shape, self._spec.numbers.factors)
            for kind in sorted(sizes.kinds)
            for name, shape in self._shapes(kind, sizes)
        }
        places = list(self._places(adapters))
        for place in places:
            arrays[place.array][place.index] = to_numpy(place.parameter) * place.scale
        return StackedFactors({name: self._placed(name, x) for name, x in arrays.items()}, places)

    def _shapes(self, kind: str, sizes: FactorSizes) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of this rank's arrays of a kind of layers."""
        info = self._kinds[kind]
        rows = () if info.rows is None else (info.rows,)
        return [
            (f"{kind}.{DOWN}", (*rows, 1, sizes.slots, sizes.rank, info.inputs)),
            (f"{kind}.{UP}", (*rows, 1, info.outputs, sizes.slots, sizes.rank)),
        ]

    def _places(self, adapters: Sequence[Mapping[str, LowRank]]) -> Iterable[_Place]:
        for slot, by_layer in enumerate(adapters):
            for key, pair in by_layer.items():
                kind, row, ranks = stacked_name(key), self._rows[key], slice(pair.target.rank)
                rows = () if row is None else (row,)
                yield _Place(pair.down.parameter, f"{kind}.{DOWN}", (*rows, 0, slot, ranks), 1.0)
                yield _Place(pair.up.parameter, f"{kind}.{UP}", (*rows, 0, slice(None), slot, ranks), pair.scale)

    def _placed(self, name: str, values: np.ndarray) -> Array:
        """Return the array of all data-parallel ranks, of which this rank has ``values``."""
        sharding = factor_sharding(self._spec, values.ndim)
        axis = values.ndim - 4
        shape = (*values.shape[:axis], self._spec.mesh.shape["dp"], *values.shape[axis + 1 :])
        with self._spec.numbers.enabled():
            return jax.make_array_from_process_local_data(sharding, values, shape)


def factor_sharding(spec: ModelSpec, n_dims: int) -> NamedSharding:
    """Return the placement of stacked factors: each data-parallel rank has its own, in full."""
    return NamedSharding(spec.mesh, PartitionSpec(*[None] * (n_dims - 4), "dp"))


def _linears(hf: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers that may have an adapter, by name: those of the decoder, and the output head."""
    head = head_name(hf)
    return decoder_linears(hf) | ({} if head is None else {head: hf.get_submodule(head)})


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0
