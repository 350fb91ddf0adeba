"""Read, write and stream the weights of a JAX model under Hugging Face names: by slices of files, or as full tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor
from transformers import PreTrainedModel

from areal.api.config import torch_dtype
from areal.api.weights import NamedTensor, SelectName
from areal.engine.checkpoint.gather_slices import ComputedSlice
from areal.engine.checkpoint.huggingface import Export, HFWeights, ModelCard
from areal.engine.checkpoint.safetensors import TensorSpec
from areal.engine.checkpoint.tensor_layout import DiskTensor, disk_layout, divided_as, joined, tied_names
from areal.engine.jax.mesh import host_view, local_boxes, to_torch
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.model_arrays import ModelState
from areal.engine.model.classifier import VALUE_HEAD
from areal.engine.model.random_init import draw
from areal.utils.dtensor import Box, full_box, gathered_dtype


class JAXWeights:
    """Weights of a JAX model. Implements :class:`~areal.api.weights.WeightSource` and
    :class:`~areal.engine.checkpoint.checkpointer.FolderWeights`.

    Args:
        model: the arrays; without values they can only be checked and read.
        hf: the model of transformers on the meta device.
    """

    def __init__(self, model: ModelState, hf: PreTrainedModel) -> None:
        self._model, self._hf = model, hf
        shapes = {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
        pieces = disk_layout(hf)
        for name in model.arrays.keys() & VALUE_HEAD:
            shape = shapes[name] = model.arrays[name].shape
            pieces[name] = (DiskTensor(name, full_box(shape)),)
        self._shapes = shapes
        self._pieces = {name: pieces[name] for name in shapes}
        # The array of each weight, and its row there.
        self._places: dict[str, tuple[str, int | None]] = {
            name: (array, row if info.stacked else None)
            for array, info in model.arrays.items()
            for row, name in enumerate(info.names)
        }

    # ---- full tensors

    def named_tensors(
        self, *, dtype: torch.dtype | None = None, exact: SelectName | None = None
    ) -> Iterator[NamedTensor]:
        """Yield all weights under the names in files: full, in host memory. Collective.

        Args:
            dtype: dtype that the caller casts the tensors to. Shards are cast before the gather if it is narrower than the master dtype.
            exact: returns True for names in files whose tensors keep the master dtype. Default: none.
        """

        def gathered(pieces: Iterable[DiskTensor]) -> torch.dtype:
            keeps = exact is not None and any(exact(piece.name) for piece in pieces)
            return gathered_dtype(torch_dtype(self._model.spec.numbers.master), None if keeps else dtype)

        return self._stream(self._model.params, gathered)

    def named_gradients(self) -> Iterator[NamedTensor]:
        """Yield the gradients of all weights in the same way. Collective."""
        master = torch_dtype(self._model.spec.numbers.master)
        return self._stream(self._model.require_grads(), lambda _: master)

    def _stream(
        self, arrays: Mapping[str, Array], gathered: Callable[[tuple[DiskTensor, ...]], torch.dtype]
    ) -> Iterator[NamedTensor]:
        def values() -> Iterator[tuple[DiskTensor, Tensor]]:
            for name, pieces in self._pieces.items():
                array, row = self._places[name]
                full = self._full(arrays[array], row, gathered(pieces))
                yield from ((piece, piece.cut(full)) for piece in pieces)

        return joined(values())

    def _full(self, array: Array, row: int | None, dtype: torch.dtype) -> Tensor:
        """Return an array, or a row of one, on every rank. Shards are cast before they are gathered."""
        spec, name = self._model.spec, str(dtype).removeprefix("torch.")
        with spec.numbers.enabled():
            if row is not None:
                array = _row(spec, name, array.sharding, array, np.int32(row))
            elif spec.mesh.size > 1:
                array = _everywhere(spec, name, array.sharding, array)
        return to_torch(self._model.spec.finished(array).addressable_data(0))

    # ---- files

    def export(self) -> Export:
        """Return the tensors to write, in the master dtype."""
        dtype = torch_dtype(self._model.spec.numbers.master)
        specs = {
            piece.name: TensorSpec(piece.name, dtype, piece.shape)
            for pieces in self._pieces.values()
            for piece in pieces
        }
        hf = self._hf
        card = ModelCard(hf.config, type(hf), getattr(hf, "generation_config", None))
        return Export(list(specs.values()), self._local_slices(), card)

    def _local_slices(self) -> Iterator[ComputedSlice]:
        """Yield the slices of tensors on disk that this rank's shards contain."""
        for name, pieces in self._pieces.items():
            array, row = self._places[name]
            for box, values in local_boxes(self._model.params[array]):
                for piece in pieces:
                    shared = piece.overlap(box if row is None else box[1:])
                    if shared is not None:
                        on_disk, inside = shared
                        compute = functools.partial(_cut, values, row, inside, on_disk)
                        yield ComputedSlice(piece.name, on_disk, compute)

    def check(self, folder: Path) -> None:
        """Compare keys and shapes of the files with the model, without reading values.

        Raises:
            ValueError: the files are missing, unreadable or of another model; names file and key.
        """
        with self._files(folder) as files:
            shapes = {
                piece.name: piece.shape for pieces in self._pieces.values() for piece in divided_as(pieces, files.shape)
            }
            files.check(shapes, type(self._hf))

    def read(self, folder: Path) -> None:
        """Fill the arrays from files that :meth:`check` has accepted. Each rank reads its shards."""
        with self._files(folder) as files:
            self.fill(lambda name, box: self._read_box(files, name, box))

    def fill(self, read: Callable[[str, Box], Tensor]) -> None:
        """Fill the arrays. Collective.

        Args:
            read: function from the name of a weight and a box of it to its values.
        """
        model = self._model
        for array in model.arrays:
            buffers = model.host_buffers(array)
            for name, boxes in model.weights_in(array, buffers):
                for box, values in boxes:
                    values.copy_(read(name, box))
            model.params[array] = model.assembled(array, buffers)

    def draw(self, seed: int) -> None:
        """Fill the arrays with random weights of transformers. A value head is zero.

        Weights are drawn in full, one layer at a time, and each process keeps its shards.
        """
        model = self._model
        buffers = {array: model.host_buffers(array) for array in model.arrays}
        boxes = {name: boxes for array, own in buffers.items() for name, boxes in model.weights_in(array, own)}

        def keep(block: dict[str, Tensor]) -> None:
            for name, full in block.items():
                for box, values in boxes[name]:
                    values.copy_(full[box])

        draw(self._hf, seed, keep)
        for array, own in buffers.items():
            model.params[array] = model.assembled(array, own)

    def _read_box(self, files: HFWeights, name: str, box: Box) -> Tensor:
        """Read a box of a weight from the tensors on disk that it consists of."""
        out: Tensor | None = None
        for piece in divided_as(self._pieces[name], files.shape):
            shared = piece.overlap(box)
            if shared is not None:
                on_disk, inside = shared
                values = files.read(piece.name, on_disk)
                if out is None:
                    out = values.new_empty([s.stop - s.start for s in box])
                out[inside] = values.view(out[inside].shape)
        if out is None:
            raise RuntimeError(f"{name}: no tensor on disk has a part of {box}")
        return out

    def _files(self, folder: Path) -> HFWeights:
        return HFWeights(folder, tied_names(self._hf), value_head=not VALUE_HEAD.isdisjoint(self._shapes))


def _cut(values: Any, row: int | None, inside: Box, on_disk: Box) -> Tensor:
    local = host_view(values) if row is None else host_view(values)[row]
    return local[inside].reshape([len(range(s.start, s.stop, s.step or 1)) for s in on_disk])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _row(spec: ModelSpec, dtype: str, sharding: NamedSharding, array: Array, row: Array) -> Array:
    return _gathered(spec, dtype, tuple(sharding.spec)[1:], lax.dynamic_index_in_dim(array, row, keepdims=False))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _everywhere(spec: ModelSpec, dtype: str, sharding: NamedSharding, array: Array) -> Array:
    return _gathered(spec, dtype, tuple(sharding.spec), array)


def _gathered(spec: ModelSpec, dtype: str, divided: tuple[Any, ...], array: Array) -> Array:
    """Return an array that is divided over mesh axes on every rank, cast before the gather.

    Without a constraint, XLA gathers before the cast. The bits travel as integers, because XLA for CPUs gathers bfloat16 as float32.
    """
    everywhere = NamedSharding(spec.mesh, PartitionSpec())
    if array.dtype == dtype:
        return lax.with_sharding_constraint(array, everywhere)
    bits = lax.bitcast_convert_type(array.astype(dtype), f"uint{8 * jnp.dtype(dtype).itemsize}")
    bits = lax.with_sharding_constraint(bits, NamedSharding(spec.mesh, PartitionSpec(*divided)))
    return lax.bitcast_convert_type(lax.with_sharding_constraint(bits, everywhere), dtype)
