"""The weights of a model with an adapter merged into them, as they are streamed and written."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from areal.api.weights import NamedTensor, WeightSource
from areal.engine.checkpoint.checkpointer import FolderWeights
from areal.engine.checkpoint.gather_slices import ComputedSlice, Slice
from areal.engine.checkpoint.huggingface import Export
from areal.engine.lora.adapter_set import AdapterSet
from areal.utils.dtensor import full_box


class ModelWeights(WeightSource, FolderWeights, Protocol):
    """A model's weights, streamed and in files."""


class AdaptedWeights:
    """What an engine computes with. Only copies are merged: no weight of the model changes.

    Args:
        weights: of the model.
    """

    def __init__(self, weights: ModelWeights, adapters: AdapterSet) -> None:
        self._weights, self._adapters = weights, adapters

    def named_tensors(self) -> Iterator[NamedTensor]:
        """The model's, with what the adapter that computes adds. Collective."""
        deltas = self._adapters.deltas()
        for name, tensor in self._weights.named_tensors():
            delta = deltas.get(_layer_name(name))
            yield NamedTensor(name, tensor if delta is None else delta.add_to(tensor, full_box(tensor.shape)))

    def named_gradients(self) -> Iterator[NamedTensor]:
        """Those of the adapter that is trained, under the names in peft's files. Collective."""
        return self._adapters.current.named_gradients()

    def export(self) -> Export:
        """What is to be written; a merged part is computed when it is wanted. Collective."""
        deltas, export = self._adapters.deltas(), self._weights.export()

        def slices() -> Iterator[Slice | ComputedSlice]:
            for entry in export.slices:
                delta = deltas.get(_layer_name(entry.name))
                if delta is None:
                    yield entry
                else:
                    compute = functools.partial(delta.add_to, entry.values, entry.box)
                    yield ComputedSlice(entry.name, entry.box, compute)

        return replace(export, slices=slices())

    def check(self, folder: Path) -> None:
        self._weights.check(folder)

    def read(self, folder: Path) -> None:
        self._weights.read(folder)


def _layer_name(name: str) -> str:
    return name.removesuffix(".weight")
