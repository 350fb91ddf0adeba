"""Save and load a JAX model, its optimizer and the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from jax import Array
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from areal.engine.checkpoint.async_save import SaveTask
from areal.engine.checkpoint.checkpointer import EngineCheckpointer, RunInfo
from areal.engine.checkpoint.dcp import (
    METADATA,
    BoxLoadPlanner,
    BoxSavePlanner,
    TensorBoxes,
    prepare_files,
    read_metadata,
    read_tensors,
)
from areal.engine.checkpoint.run_tensors import EXCHANGING, MODEL, OPTIM, check_weights, weight_key
from areal.engine.jax.mesh import distinct_shards, host_view
from areal.engine.jax.model_arrays import Boxes, ModelState
from areal.engine.jax.optimizer import OptaxOptimizer
from areal.engine.jax.weights import JAXWeights
from areal.engine.optimizer import ClippingOptimizer
from areal.utils.distributed import ControlPlane

_STEP = "step"


class JAXCheckpointer(EngineCheckpointer):
    """Checkpoints of one JAX engine.

    ``"dcp"`` checkpoints have the tensors of the FSDP engine: each engine loads those of the other, with optimizer state.

    Args:
        model: arrays of the model.
        optimizer: optimizer of the model, or ``None``.
        weights: weights of the same arrays.
        run, control, source, options: as in :class:`~areal.engine.checkpoint.checkpointer.EngineCheckpointer`.
    """

    engine: ClassVar[str] = "jax"
    reads: ClassVar[frozenset[str]] = EXCHANGING

    def __init__(
        self,
        model: ModelState,
        optimizer: ClippingOptimizer[OptaxOptimizer] | None,
        weights: JAXWeights,
        run: RunInfo,
        control: ControlPlane,
        source: str,
        **options: Any,
    ) -> None:
        kind = optimizer.inner.torch_name if optimizer else None
        super().__init__(optimizer, kind, weights, run, control, source, **options)
        self._model = model
        self._optimizer = optimizer.inner if optimizer else None

    # ---- saving

    def _prepare_dcp(
        self, files: Mapping[str, bytes], draft: Path, *, with_optim: bool, asynchronous: bool, about: dict[str, Any]
    ) -> SaveTask:
        tensors = self._control.attempt(lambda: dict(self._tensors(with_optim=with_optim)))
        return prepare_files(
            tensors, files, BoxSavePlanner(), self._control, draft, asynchronous=asynchronous, about=about
        )

    def _tensors(self, *, with_optim: bool) -> Iterator[tuple[str, TensorBoxes | Tensor]]:
        """Yield the tensors of this rank by their keys: one for each weight of transformers."""
        model, optimizer = self._model, self._optimizer if with_optim else None
        for name, array in model.params.items():
            yield from ((f"{MODEL}{key}", box) for key, box in self._boxes(name, array))
            # As in torch, state begins with the first step.
            if optimizer is None or (optimizer.counted(name) and not optimizer.counts[name]):
                continue
            for kind, moments in optimizer.moments.items():
                if name in moments:
                    yield from ((f"{OPTIM}{key}.{kind}", box) for key, box in self._boxes(name, moments[name]))
            if optimizer.counted(name):
                step = torch.tensor(float(optimizer.counts[name]))
                yield from ((f"{OPTIM}{weight_key(weight)}.{_STEP}", step) for weight in model.arrays[name].names)

    def _boxes(self, name: str, array: Array) -> Iterator[tuple[str, TensorBoxes]]:
        """Yield the weights in this process's shards of an array by their keys, in the memory of the array on a CPU."""
        yield from self._divided(name, [(box, host_view(shard)) for box, shard in distinct_shards(array)])

    def _divided(self, name: str, boxes: Boxes) -> Iterator[tuple[str, TensorBoxes]]:
        """Yield the weights in this process's boxes of an array of parameters.

        Args:
            name: name of the array.
            boxes: the boxes with their values.
        """
        info = self._model.arrays[name]
        for weight, parts in self._model.weights_in(name, boxes):
            yield weight_key(weight), TensorBoxes(parts, info.shape[1:] if info.stacked else info.shape)

    # ---- loading

    def _check_dcp(self, path: Path, about: Mapping[str, Any], *, with_optim: bool) -> Callable[[], None]:
        # Weights of the full model, on every rank; then the steps of the optimizer, which are read now.
        metadata = read_metadata(path)
        shapes = {
            weight_key(weight): info.shape[1:] if info.stacked else info.shape
            for info in self._model.arrays.values()
            for weight in info.names
        }
        check_weights(path, metadata, shapes)
        optimizer = self._optimizer if with_optim else None
        counts = self._read_counts(path, metadata) if optimizer else {}

        def read() -> None:
            for name in self._model.arrays:
                self._model.params[name] = self._read(path, metadata, name, f"{MODEL}{{}}")
            if optimizer:
                # The arrays before first: they need the memory.
                optimizer.moments, optimizer.counts = {}, counts
                for name, kinds in optimizer.kinds.items() if _has_moments(metadata) else ():
                    for kind in kinds:
                        moment = self._read(path, metadata, name, f"{OPTIM}{{}}.{kind}")
                        optimizer.moments.setdefault(kind, {})[name] = moment

        return read

    def _read(self, path: Path, metadata: Metadata, name: str, key: str) -> Array:
        """Read an array that is placed as parameters are. Weights that the checkpoint does not have are zero.

        Args:
            name: name of the array.
            key: key of its tensors in the checkpoint, with ``{}`` for the one of the weight.
        """
        buffers = self._model.host_buffers(name)
        boxes = {key.format(weight): box for weight, box in self._divided(name, buffers)}
        saved = {full: box for full, box in boxes.items() if full in metadata.state_dict_metadata}
        read_tensors(path, metadata, saved, BoxLoadPlanner())
        return self._model.assembled(name, buffers)

    def _read_counts(self, path: Path, metadata: Metadata) -> dict[str, int]:
        """Read the optimizer steps of each array.

        Raises:
            ValueError: weights of one array have different numbers of steps; names file and key.
        """
        # State begins with the first step. SGD does not count steps.
        keys = {
            weight: f"{OPTIM}{weight_key(weight)}.{_STEP}"
            for info in self._model.arrays.values()
            for weight in info.names
        }
        steps = {
            key: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for key in keys.values()
            if isinstance(entry := metadata.state_dict_metadata.get(key), TensorStorageMetadata)
        }
        read_tensors(path, metadata, steps, BoxLoadPlanner())

        counts: dict[str, int] = {}
        for name, info in self._model.arrays.items():
            by_weight = {weight: int(steps[key]) if (key := keys[weight]) in steps else 0 for weight in info.names}
            first = info.names[0]
            other = next((weight for weight in info.names if by_weight[weight] != by_weight[first]), None)
            if other is not None:
                raise ValueError(
                    f"{path / METADATA}: {keys[first]!r} is {by_weight[first]} and {keys[other]!r} is {by_weight[other]}, but the JAX "
                    "engine updates all layers together: load with with_optim=False"
                )
            counts[name] = by_weight[first]
        return counts


def _has_moments(metadata: Metadata) -> bool:
    """Return False for a checkpoint from before the first optimizer step."""
    return any(key.startswith(OPTIM) for key in metadata.state_dict_metadata)
