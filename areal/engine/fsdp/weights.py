"""A sharded model's weights from and to Hugging Face names: read in slices, streamed in full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from areal.api.weights import NamedTensor
from areal.engine.collect import Slice, whole
from areal.engine.disk_layout import DiskTensor, disk_layout, stored_tensors
from areal.engine.fsdp.initialize import init_weights, materialize
from areal.engine.fsdp.shards import full_tensor, local_shard, reshard
from areal.engine.hf_checkpoint import VALUE_HEAD, Export, HFWeights, ModelCard
from areal.engine.model import PackedCausalLM
from areal.engine.model_folder import model_folder
from areal.engine.safetensors_files import TensorSpec

__all__ = ["FSDPWeights", "init_weights", "load_weights"]


def load_weights(model: PackedCausalLM, path: str | Path, device: torch.device) -> None:
    """Materialise a model with the weights of a model directory. Each rank reads its own slices.

    Args:
        model: on the meta device, sharded.
        path: a directory or hub name, with safetensors. Values are cast to the dtype of the parameters. A value head is read from
            ``value_head.safetensors``, or is zero where there is none.

    Raises:
        ValueError: the files are missing, damaged, or of another model; names file and key.
    """
    folder, weights = model_folder(path), FSDPWeights(model)
    weights.check(folder)
    materialize(model, device)
    weights.read(folder)


@dataclass(frozen=True)
class Stored:
    """A tensor of a model that is stored, sharded or not, and the tensors on disk that make it up."""

    tensor: Tensor
    pieces: tuple[DiskTensor, ...]
    is_parameter: bool


class FSDPWeights:
    """A sharded model's weights: from and to a model directory, and streamed with its gradients, one full tensor at a time.

    Args:
        model: sharded, and materialised but for :meth:`check`.
    """

    def __init__(self, model: PackedCausalLM) -> None:
        self._model = model
        self._layout = disk_layout(model.hf)

    def stored(self) -> list[Stored]:
        """What is stored, in the order of the model: parameters, buffers, a value head last. Parameters are put back to their shards."""
        reshard(self._model)
        parameters = {id(parameter) for parameter in self._model.parameters()}
        tensors = [(tensor, self._layout[name]) for name, tensor in stored_tensors(self._model.hf)]
        if self._model.value_head is not None:
            weight = self._model.value_head.weight
            tensors.append((weight, (DiskTensor(VALUE_HEAD, whole(weight.shape)),)))
        return [Stored(tensor, pieces, id(tensor) in parameters) for tensor, pieces in tensors]

    def named_tensors(self) -> Iterator[NamedTensor]:
        """All weights under the names of the files: full, in their own dtype, on the device. A shared weight comes once, stacked
        experts one by one, a value head last. Collective: every rank iterates to the end.
        """
        for stored in self.stored():
            full = full_tensor(stored.tensor)
            yield from (NamedTensor(piece.name, piece.cut(full)) for piece in stored.pieces)

    def named_gradients(self) -> Iterator[NamedTensor]:
        """The gradients of all parameters, likewise; zeros where a parameter has none. Collective."""
        for tensor, pieces in ((s.tensor, s.pieces) for s in self.stored() if s.is_parameter):
            full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if tensor.grad is not None:
                full = full_tensor(tensor.grad)
            yield from (NamedTensor(piece.name, piece.cut(full)) for piece in pieces)

    def export(self) -> Export:
        """What is to be written: the weights, in the dtype of the parameters."""
        hf, stored = self._model.hf, self.stored()
        return Export(
            [TensorSpec(piece.name, s.tensor.dtype, piece.shape) for s in stored for piece in s.pieces],
            local_slices(stored),
            ModelCard(hf.config, type(hf), getattr(hf, "generation_config", None)),
        )

    def check(self, folder: Path) -> None:
        """Compare keys and shapes of the files with the model, materialised or not, reading no values.

        Raises:
            ValueError: the files are missing, unreadable or of another model; names file and key.
        """
        shapes = {piece.name: piece.shape for pieces in self._layout.values() for piece in pieces}
        if self._model.value_head is not None:
            shapes[VALUE_HEAD] = tuple(self._model.value_head.weight.shape)
        with self._files(folder) as files:
            files.check(shapes, type(self._model.hf))

    @torch.no_grad()
    def read(self, folder: Path) -> None:
        """Fill this rank's shards from files that :meth:`check` has accepted."""
        with self._files(folder) as files:
            for part in local_slices(self.stored()):
                part.values.copy_(files.read(part.name, part.box).view(part.values.shape))

    def _files(self, folder: Path) -> HFWeights:
        return HFWeights(folder, _tied_names(self._model), value_head=self._model.value_head is not None)


def local_slices(stored: Iterable[Stored]) -> Iterator[Slice]:
    """The parts of the tensors on disk that this rank's shards hold, sharing their memory."""
    for s in stored:
        local, box = local_shard(s.tensor)
        for piece in s.pieces:
            shared = piece.overlap(box)
            if shared is not None:
                on_disk, in_box = shared
                yield Slice(piece.name, on_disk, local[in_box].view([part.stop - part.start for part in on_disk]))


def _tied_names(model: PackedCausalLM) -> dict[str, list[str]]:
    """For each parameter with several names, by its first one, the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.hf.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}
