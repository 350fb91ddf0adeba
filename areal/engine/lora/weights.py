"""Stream and write the weights of a model with an adapter merged into them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from areal.api.weights import NamedTensor, WeightSource
from areal.engine.checkpoint.checkpointer import FolderWeights
from areal.engine.checkpoint.gather_slices import ComputedSlice, Slice
from areal.engine.checkpoint.huggingface import Export
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.lora.low_rank import WeightDelta
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import full_box


class ModelWeights(WeightSource, FolderWeights, Protocol):
    """A model's weights, as a stream and in files."""


class AdaptedWeights:
    """The weights of a model with the active adapter merged. Only copies are changed, never the model.

    Args:
        weights: weights of the model.
        adapters: adapters of the engine.
        control: control plane over all ranks of the engine.
    """

    def __init__(self, weights: ModelWeights, adapters: AdapterSet, control: ControlPlane) -> None:
        self._weights, self._adapters, self._control = weights, adapters, control

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield the model's weights with the active adapter merged. Collective."""
        deltas = self._adapters.deltas()
        if deltas:
            self._check_mergeable(deltas, self._weights.export())
        for name, tensor in self._weights.named_tensors():
            delta = deltas.get(_layer_name(name))
            yield NamedTensor(name, tensor if delta is None else delta.add_to(tensor, full_box(tensor.shape)))

    def named_gradients(self) -> Iterator[NamedTensor]:
        """Yield the gradients of the trained adapter, by peft's names. Collective."""
        return self._adapters.current.named_gradients()

    def export(self) -> Export:
        """Return the tensors to write; merged slices are computed on demand. Collective."""
        deltas, export = self._adapters.deltas(), self._weights.export()
        self._check_mergeable(deltas, export)

        def slices() -> Iterator[Slice | ComputedSlice]:
            for entry in export.slices:
                delta = deltas.get(_layer_name(entry.name))
                if delta is None:
                    yield entry
                else:
                    # Merge when the slice is written, so that no second copy of the model exists.
                    compute = functools.partial(delta.add_to, entry.values, entry.box)
                    yield ComputedSlice(entry.name, entry.box, compute)

        return replace(export, slices=slices())

    def check(self, folder: Path) -> None:
        self._weights.check(folder)

    def read(self, folder: Path) -> None:
        self._weights.read(folder)

    def _check_mergeable(self, deltas: Mapping[str, WeightDelta], export: Export) -> None:
        # Raised by all ranks together, so that the engine can still be used.
        self._control.attempt(lambda: _check_mergeable(deltas, export))


def _check_mergeable(deltas: Mapping[str, WeightDelta], export: Export) -> None:
    """Check that files contain each adapted layer by itself and under its own name.

    Raises:
        ValueError: a layer is stored under another name, or merged with other layers.
    """
    layers = {_layer_name(spec.name) for spec in export.specs}
    missing = [key for key in deltas if key not in layers]
    if missing:
        raise ValueError(
            f"{export.card.model.__name__} stores {missing[0]} under another name or merged with other layers, so that its "
            "adapter cannot be merged into full weights: save or send the adapter alone, by engine.adapters"
        )


def _layer_name(name: str) -> str:
    return name.removesuffix(".weight")
