"""The components of an engine that trains adapters instead of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from areal.api.checkpoint import SaveLoadMeta
from areal.api.config import TrainEngineConfig
from areal.api.weights import NamedTensor, SelectName, WeightSource
from areal.engine.checkpoint.async_save import SaveTask
from areal.engine.checkpoint.checkpointer import EngineCheckpointer, FolderWeights, RunInfo
from areal.engine.checkpoint.gather_slices import ComputedSlice, Slice
from areal.engine.checkpoint.huggingface import Export
from areal.engine.components import EngineComponents
from areal.engine.lora.adapter_files import write_files
from areal.engine.lora.adapter_set import AdapterSet, SelectedOptimizer
from areal.engine.lora.low_rank import WeightDelta
from areal.engine.optimizer import GradientState
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import full_box


class Engine(RunInfo, Protocol):
    """The attributes of an engine that its adapters need."""

    config: TrainEngineConfig
    control: ControlPlane


class SelectedGradients:
    """The gradients of the selected adapter. Implements :class:`areal.engine.components.Gradients`."""

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters

    @property
    def state(self) -> GradientState:
        return self._adapters.current.pending

    def before_backward(self) -> None:
        self._adapters.current.before_backward()

    def zero(self) -> None:
        self._adapters.zero_grad()


def with_adapters(
    components: EngineComponents, weights: ModelWeights, adapters: AdapterSet, engine: Engine
) -> EngineComponents:
    """Replace the optimizer, the checkpointer, the weights and the gradients by those of adapters.

    Args:
        components: components of an engine whose model is not trained.
        weights: weights of that model.
    """
    config, adapted = engine.config, AdaptedWeights(weights, adapters, engine.control)
    trained = config.optimizer is not None
    return replace(
        components,
        optimizer=SelectedOptimizer(adapters) if trained else None,
        checkpointer=AdapterCheckpointer(adapters, adapted, engine, engine.control, config.path, trained),
        weights=adapted,
        gradients=SelectedGradients(adapters),
        adapters=adapters,
    )


_FOLDER = "adapters"


class AdapterCheckpointer(EngineCheckpointer):
    """Checkpoints of an engine with adapters.

    A ``"dcp"`` checkpoint contains each adapter in ``adapters/NAME``, in peft's format. It does not contain the
    model, which never changes. Loading it replaces all adapters. ``"hf"`` saves the model with the selected adapter
    merged into it.

    Args:
        adapters: adapters of the engine.
        weights: weights of the model, with the selected adapter merged.
        trained: bool. True if adapters have optimizers.
    """

    engine: ClassVar[str] = "lora"

    def __init__(
        self,
        adapters: AdapterSet,
        weights: FolderWeights,
        run: RunInfo,
        control: ControlPlane,
        source: str,
        trained: bool,
        **options: Any,
    ) -> None:
        super().__init__(None, "adapters" if trained else None, weights, run, control, source, **options)
        self._adapters = adapters

    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> SaveTask:
        everything = dict(files)
        # Gathering an adapter's files is collective: all ranks go through all adapters.
        for name in self._adapters.names:
            for file, content in self._adapters.files(name, with_optim=with_optim).items():
                everything[f"{_FOLDER}/{name}/{file}"] = content

        about |= {"adapters": list(self._adapters.names), "selected": self._adapters.selected}
        return write_files(everything, draft, about)

    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        # Read everything now, so that damaged files are found before any adapter is replaced.
        adapters = {
            name: self._adapters.read(path / _FOLDER / name, with_optim=with_optim) for name in about["adapters"]
        }
        return lambda: self._adapters.replace(adapters, about["selected"])

    def _check_folder(self, meta: SaveLoadMeta) -> Callable[[], None]:
        # The base weights of an engine with adapters never change.
        raise ValueError(
            f"SaveLoadMeta.weight_format = 'hf' to load {meta.path} into an engine with adapters, whose model does not change: load an "
            "adapter with engine.adapters.load, or make an engine with this path"
        )


class ModelWeights(WeightSource, FolderWeights, Protocol):
    """A model's weights, as a stream and in files."""

    def named_tensors(
        self, *, dtype: torch.dtype | None = None, exact: SelectName | None = None
    ) -> Iterator[NamedTensor]:
        """Yield full tensors; those that ``exact`` selects keep their own dtype. See :class:`~areal.api.weights.WeightSource`."""
        ...


class AdaptedWeights:
    """The weights of a model with the active adapter merged. Only copies are changed, never the model.

    Args:
        weights: weights of the model.
        adapters: adapters of the engine.
        control: control plane over all ranks of the engine.
    """

    def __init__(self, weights: ModelWeights, adapters: AdapterSet, control: ControlPlane) -> None:
        self._weights, self._adapters, self._control = weights, adapters, control

    def named_tensors(self, *, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
        """Yield the model's weights with the active adapter merged. Collective."""
        deltas = self._adapters.deltas()
        if deltas:
            self._check_mergeable(deltas, self._weights.export())
        # An adapter is merged before the cast: a weight that was rounded before would be rounded twice.
        merged = self._weights.named_tensors(dtype=dtype, exact=lambda name: _layer_name(name) in deltas)
        for name, tensor in merged:
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
