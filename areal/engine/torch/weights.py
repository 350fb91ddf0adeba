"""Read, write and stream a sharded model's weights under Hugging Face names: from slices of files, to slices of files,
or as full tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.weights import NamedTensor, SelectName
from areal.engine.checkpoint.gather_slices import Slice
from areal.engine.checkpoint.huggingface import Export, HFWeights, ModelCard
from areal.engine.checkpoint.safetensors import TensorSpec
from areal.engine.checkpoint.tensor_layout import (
    DiskTensor,
    disk_layout,
    divided_as,
    joined,
    stored_tensors,
    tied_names,
)
from areal.engine.model.hub import model_folder
from areal.engine.model.packed_lm import PackedCausalLM
from areal.engine.torch.model_chunks import ModelChunks
from areal.engine.torch.random_init import init_weights, materialize
from areal.utils.dtensor import collective_device, full_box, full_tensor, gathered_dtype, local_shard

__all__ = ["ShardedWeights", "init_weights", "load_weights"]


def load_weights(chunks: ModelChunks, path: str | Path, device: torch.device, buffer_device: torch.device) -> None:
    """Materialise a model with the weights of a model directory. Each rank reads its own slices.

    Args:
        chunks: sharded model on the meta device.
        path: directory or hub name with safetensors. Values are cast to the dtype of the parameters. A value head
            is read from ``value_head.safetensors``, or is zero without that file.
        device, buffer_device: as in :func:`~areal.engine.torch.random_init.materialize`.

    Raises:
        ValueError: the files are missing, damaged, or of another model; names file and key.
    """
    folder, weights = model_folder(path), ShardedWeights(chunks)
    weights.check(folder)
    for chunk in chunks:
        materialize(chunk, device, buffer_device)
    weights.read(folder)


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor of the full model, and the tensors on disk that it consists of.

    Attributes:
        like: tensor with the full shape and dtype, without values.
        pieces: tensors on disk, or slices of them, in order.
        is_parameter: False for a buffer.
    """

    like: Tensor
    pieces: tuple[DiskTensor, ...]
    is_parameter: bool


class ShardedWeights:
    """Weights of a sharded model: reads and writes model directories, and streams full tensors.

    Args:
        chunks: sharded model. Must be materialised, except for :meth:`check`.
    """

    def __init__(self, chunks: ModelChunks) -> None:
        self._chunks = chunks
        self._stored_tensors = _stored_tensors(chunks.full_model)

    def named_tensors(
        self, *, dtype: torch.dtype | None = None, exact: SelectName | None = None
    ) -> Iterator[NamedTensor]:
        """Yield all weights under the names in files: full, on the device. Collective: every rank must iterate to the end.

        A shared weight comes once, stacked experts one by one, a value head last.

        Args:
            dtype: dtype that the caller casts the tensors to. Shards are cast before the gather if it is narrower than theirs.
            exact: returns True for names in files whose tensors keep their own dtype. Default: none.
        """

        def gathered(name: str) -> torch.dtype:
            stored = self._stored_tensors[name]
            keeps = exact is not None and any(exact(piece.name) for piece in stored.pieces)
            return gathered_dtype(stored.like.dtype, None if keeps else dtype)

        return self._stream(self._stored_tensors, full_tensor, gathered)

    def named_gradients(self) -> Iterator[NamedTensor]:
        """Yield the gradients of all parameters, in the same way; zeros for a parameter without gradient. Collective."""
        return self._stream(
            {name: stored for name, stored in self._stored_tensors.items() if stored.is_parameter},
            _full_gradient,
            lambda name: self._stored_tensors[name].like.dtype,
        )

    def _stream(
        self,
        tensors: dict[str, StoredTensor],
        full_value: Callable[[Tensor, torch.dtype], Tensor],
        gathered: Callable[[str], torch.dtype],
    ) -> Iterator[NamedTensor]:
        return joined(self._streamed_pieces(tensors, full_value, gathered))

    def _streamed_pieces(
        self,
        tensors: dict[str, StoredTensor],
        full_value: Callable[[Tensor, torch.dtype], Tensor],
        gathered: Callable[[str], torch.dtype],
    ) -> Iterator[tuple[DiskTensor, Tensor]]:
        """Yield tensors on disk and slices of them, with their values.

        Args:
            tensors: stored tensors by name.
            full_value: function from a shard and a dtype to the full tensor.
            gathered: function from a name to the dtype in which the tensor travels.
        """
        chunks, local = self._chunks, dict(self._chunks.own())
        # With CPU offload the shards are on the host, but collectives use the device.
        device = collective_device(next(iter(local.values())))
        for name, stored in tensors.items():
            # The ranks of one stage gather the tensor from their shards, and broadcast it to the other stages.
            owner = chunks.split.rank_of(name)
            if owner == chunks.rank:
                full = full_value(local[name], gathered(name))
            else:
                full = torch.empty(stored.like.shape, dtype=gathered(name), device=device)
            if chunks.group is not None:
                dist.broadcast(full, group=chunks.group, group_src=owner)
            yield from ((piece, piece.cut(full)) for piece in stored.pieces)

    def export(self) -> Export:
        """Return the tensors to write: the weights, in the dtype of the parameters."""
        # All ranks describe the full model, and each contributes its own slices.
        hf = self._chunks.full_model.hf
        # Several weights may be slices of one tensor on disk.
        specs = {
            piece.name: TensorSpec(piece.name, stored.like.dtype, piece.shape)
            for stored in self._stored_tensors.values()
            for piece in stored.pieces
        }
        return Export(
            list(specs.values()),
            self._local_slices({name: stored.pieces for name, stored in self._stored_tensors.items()}),
            ModelCard(hf.config, type(hf), getattr(hf, "generation_config", None)),
        )

    def check(self, folder: Path) -> None:
        """Compare keys and shapes of the files with the full model, without reading values.

        Raises:
            ValueError: the files are missing, unreadable or of another model; names file and key.
        """
        with self._files(folder) as files:
            shapes = {piece.name: piece.shape for pieces in self._pieces_in(files).values() for piece in pieces}
            files.check(shapes, type(self._chunks.full_model.hf))

    @torch.no_grad()
    def read(self, folder: Path) -> None:
        """Fill this rank's shards from files that :meth:`check` has accepted."""
        with self._files(folder) as files:
            for local_slice in self._local_slices(self._pieces_in(files)):
                local_slice.values.copy_(files.read(local_slice.name, local_slice.box).view(local_slice.values.shape))

    def _pieces_in(self, files: HFWeights) -> dict[str, tuple[DiskTensor, ...]]:
        """Return the tensors on disk that each stored tensor consists of, in the sizes that the files have."""
        return {name: divided_as(stored.pieces, files.shape) for name, stored in self._stored_tensors.items()}

    def _local_slices(self, layout: Mapping[str, tuple[DiskTensor, ...]]) -> Iterator[Slice]:
        """Yield the slices of tensors on disk that this rank's shards contain, sharing their memory."""
        for name, tensor in self._chunks.stored():
            local, box = local_shard(tensor)
            for piece in layout[name]:
                # A shard of stacked experts overlaps with some of the tensors on disk, and only partly with the outer ones.
                shared = piece.overlap(box)
                if shared is not None:
                    on_disk, in_box = shared
                    yield Slice(
                        piece.name,
                        on_disk,
                        local[in_box].view([len(range(s.start, s.stop, s.step or 1)) for s in on_disk]),
                    )

    def _files(self, folder: Path) -> HFWeights:
        model = self._chunks.full_model
        return HFWeights(folder, tied_names(model.hf), value_head=model.value_head is not None)


def _stored_tensors(model: PackedCausalLM) -> dict[str, StoredTensor]:
    """Return the stored tensors by name, in the order of the model: parameters, buffers, value head."""
    layout = {f"hf.{name}": pieces for name, pieces in disk_layout(model.hf).items()}
    parameters = {id(parameter) for parameter in model.parameters()}
    tensors = {f"hf.{name}": tensor for name, tensor in stored_tensors(model.hf)}
    # transformers does not know the value head: it has a separate file.
    for name, parameter in model.value_head.named_parameters() if model.value_head is not None else ():
        key = f"value_head.{name}"
        tensors[key], layout[key] = parameter, (DiskTensor(key, full_box(parameter.shape)),)
    return {name: StoredTensor(tensor, layout[name], id(tensor) in parameters) for name, tensor in tensors.items()}


def _full_gradient(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    if parameter.grad is not None:
        return full_tensor(parameter.grad)
    return torch.zeros(parameter.shape, dtype=dtype, device=collective_device(parameter))
