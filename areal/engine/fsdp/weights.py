"""A sharded model's weights from and to Hugging Face names: read in slices, streamed in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.weights import NamedTensor
from areal.engine.checkpoint.gather_slices import Slice
from areal.engine.checkpoint.huggingface import VALUE_HEAD, Export, HFWeights, ModelCard
from areal.engine.checkpoint.safetensors import TensorSpec
from areal.engine.checkpoint.tensor_layout import DiskTensor, disk_layout, stored_tensors
from areal.engine.fsdp.pipeline.model_chunks import ModelChunks
from areal.engine.fsdp.random_init import init_weights, materialize
from areal.engine.model.hub import model_folder
from areal.engine.model.packed_lm import PackedCausalLM
from areal.utils.dtensor import collective_device, full_box, full_tensor, local_shard

__all__ = ["FSDPWeights", "init_weights", "load_weights"]


def load_weights(chunks: ModelChunks, path: str | Path, device: torch.device) -> None:
    """Materialise a model with the weights of a model directory. Each rank reads its own slices.

    Args:
        chunks: on the meta device, sharded.
        path: a directory or hub name, with safetensors. Values are cast to the dtype of the parameters. A value head is read from
            ``value_head.safetensors``, or is zero where there is none.

    Raises:
        ValueError: the files are missing, damaged, or of another model; names file and key.
    """
    folder, weights = model_folder(path), FSDPWeights(chunks)
    weights.check(folder)
    for chunk in chunks:
        materialize(chunk, device)
    weights.read(folder)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the whole model that is stored, and the tensors on disk that make it up.

    Attributes:
        like: its full shape and its dtype, without values. pieces: in order.
    """

    like: Tensor
    pieces: tuple[DiskTensor, ...]
    is_parameter: bool


class FSDPWeights:
    """A sharded model's weights: from and to a model directory, and streamed with its gradients, one full tensor at a time.

    Args:
        chunks: sharded, and materialised but for :meth:`check`.
    """

    def __init__(self, chunks: ModelChunks) -> None:
        self._chunks = chunks
        self._stored_tensors = _stored_tensors(chunks.full_model)

    def named_tensors(self) -> Iterator[NamedTensor]:
        """All weights under the names of the files: full, in their own dtype, on the device. A shared weight comes once, stacked
        experts one by one, a value head last. Collective: every rank iterates to the end.
        """
        return self._stream(self._stored_tensors, full_tensor)

    def named_gradients(self) -> Iterator[NamedTensor]:
        """The gradients of all parameters, likewise; zeros where a parameter has none. Collective."""
        return self._stream(
            {name: stored for name, stored in self._stored_tensors.items() if stored.is_parameter}, _full_gradient
        )

    def _stream(
        self, tensors: dict[str, StoredTensor], full_value: Callable[[Tensor], Tensor]
    ) -> Iterator[NamedTensor]:
        chunks, local = self._chunks, dict(self._chunks.own())
        device = collective_device(next(iter(local.values())))
        for name, stored in tensors.items():
            owner = chunks.split.rank_of(name)
            if owner == chunks.rank:
                full = full_value(local[name])
            else:
                full = torch.empty(stored.like.shape, dtype=stored.like.dtype, device=device)
            if chunks.group is not None:
                dist.broadcast(full, group=chunks.group, group_src=owner)
            yield from (NamedTensor(piece.name, piece.cut(full)) for piece in stored.pieces)

    def export(self) -> Export:
        """What is to be written: the weights, in the dtype of the parameters."""
        hf = self._chunks.full_model.hf
        return Export(
            [
                TensorSpec(piece.name, stored.like.dtype, piece.shape)
                for stored in self._stored_tensors.values()
                for piece in stored.pieces
            ],
            self._local_slices(),
            ModelCard(hf.config, type(hf), getattr(hf, "generation_config", None)),
        )

    def check(self, folder: Path) -> None:
        """Compare keys and shapes of the files with the whole model, reading no values.

        Raises:
            ValueError: the files are missing, unreadable or of another model; names file and key.
        """
        shapes = {piece.name: piece.shape for stored in self._stored_tensors.values() for piece in stored.pieces}
        with self._files(folder) as files:
            files.check(shapes, type(self._chunks.full_model.hf))

    @torch.no_grad()
    def read(self, folder: Path) -> None:
        """Fill this rank's shards from files that :meth:`check` has accepted."""
        with self._files(folder) as files:
            for local_slice in self._local_slices():
                local_slice.values.copy_(files.read(local_slice.name, local_slice.box).view(local_slice.values.shape))

    def _local_slices(self) -> Iterator[Slice]:
        """The parts of the tensors on disk that this rank's shards hold, sharing their memory."""
        for name, tensor in self._chunks.stored():
            local, box = local_shard(tensor)
            for piece in self._stored_tensors[name].pieces:
                shared = piece.overlap(box)
                if shared is not None:
                    on_disk, in_box = shared
                    yield Slice(
                        piece.name,
                        on_disk,
                        local[in_box].view([extent.stop - extent.start for extent in on_disk]),
                    )

    def _files(self, folder: Path) -> HFWeights:
        model = self._chunks.full_model
        return HFWeights(folder, _tied_names(model), value_head=model.value_head is not None)


def _stored_tensors(model: PackedCausalLM) -> dict[str, StoredTensor]:
    """What is stored, by the name in the model and in its order: parameters, buffers, a value head last."""
    layout = {f"hf.{name}": pieces for name, pieces in disk_layout(model.hf).items()}
    parameters = {id(parameter) for parameter in model.parameters()}
    tensors = {f"hf.{name}": tensor for name, tensor in stored_tensors(model.hf)}
    if model.value_head is not None:
        weight = tensors[VALUE_HEAD] = model.value_head.weight
        layout[VALUE_HEAD] = (DiskTensor(VALUE_HEAD, full_box(weight.shape)),)
    return {name: StoredTensor(tensor, layout[name], id(tensor) in parameters) for name, tensor in tensors.items()}


def _full_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is not None:
        return full_tensor(parameter.grad)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=collective_device(parameter))


def _tied_names(model: PackedCausalLM) -> dict[str, list[str]]:
    """For each parameter with several names, by its first one, the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.hf.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}
