"""A sharded model's weights from and to Hugging Face names: read in slices, streamed in full."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from areal.api.weights import NamedTensor
from areal.engine.fsdp.initialize import init_weights, materialize
from areal.engine.fsdp.naming import DiskTensor, disk_layout, stored_tensors, whole
from areal.engine.fsdp.shards import full_tensor, local_shard, reshard
from areal.engine.model import PackedCausalLM
from areal.engine.safetensors_files import TensorFiles

__all__ = [
    "VALUE_HEAD",
    "VALUE_HEAD_FILE",
    "FSDPWeights",
    "check_weights",
    "init_weights",
    "load_weights",
    "model_folder",
    "read_weights",
]

VALUE_HEAD = "value_head.weight"
VALUE_HEAD_FILE = "value_head.safetensors"
"""A value head has a file of its own: to transformers, the rest is a causal language model like any other."""


def model_folder(path: str | Path) -> Path:
    """The directory of a model: ``path`` itself, or where the hub's files for that name are kept.

    Raises:
        ValueError: it is no directory, and the hub has no model of that name or cannot be reached.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(
            snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"path = {str(path)!r}: neither a directory nor a model that the hub gives: {error}"
        ) from error


def load_weights(model: PackedCausalLM, path: str | Path, device: torch.device) -> None:
    """Materialise a model with the weights of a model directory. Each rank reads its own slices.

    Args:
        model: on the meta device, sharded.
        path: a directory or hub name, with safetensors. Values are cast to the dtype of the parameters. A value head is read from
            ``value_head.safetensors``, or is zero where there is none.

    Raises:
        ValueError: the files are missing, damaged, or of another model; names file and key.
    """
    folder = model_folder(path)
    check_weights(model, folder)
    materialize(model, device)
    read_weights(model, folder)


def check_weights(model: PackedCausalLM, folder: Path) -> None:
    """Compare keys and shapes of the files with the model, reading no values.

    Raises:
        ValueError: the files are missing, unreadable or of another model; names file and key.
    """
    with TensorFiles.of_model(folder) as files:
        layout, tied = disk_layout(model.hf), _tied_names(model)
        for name, pieces in layout.items():
            for piece in pieces:
                _check_piece(files, _key_on_disk(files, piece, tied.get(name, [])), piece, folder)
        known = {piece.name for pieces in layout.values() for piece in pieces}.union(*tied.values())
        extra = [key for key in files if key not in known and not _is_ignored(model, key)]
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise ValueError(
                f"{files.file_of(extra[0])} has {extra[0]!r}{more}, which {type(model.hf).__name__} has not"
            )
    if model.value_head is not None and (folder / VALUE_HEAD_FILE).exists():
        with TensorFiles.of_file(folder / VALUE_HEAD_FILE) as files:
            if VALUE_HEAD not in files:
                raise ValueError(f"{folder / VALUE_HEAD_FILE} has no {VALUE_HEAD!r}")
            _check_piece(files, VALUE_HEAD, DiskTensor(VALUE_HEAD, whole(model.value_head.weight.shape)), folder)


@torch.no_grad()
def read_weights(model: PackedCausalLM, folder: Path) -> None:
    """Fill this rank's shards from files that :func:`check_weights` has accepted."""
    reshard(model)
    tensors, tied = dict(stored_tensors(model.hf)), _tied_names(model)
    with TensorFiles.of_model(folder) as files:
        for name, pieces in disk_layout(model.hf).items():
            keyed = [(_key_on_disk(files, piece, tied.get(name, [])), piece) for piece in pieces]
            _fill(tensors[name], keyed, files)
    if model.value_head is None:
        return
    weight = model.value_head.weight
    if (folder / VALUE_HEAD_FILE).exists():
        with TensorFiles.of_file(folder / VALUE_HEAD_FILE) as files:
            _fill(weight, [(VALUE_HEAD, DiskTensor(VALUE_HEAD, whole(weight.shape)))], files)
    else:
        local_shard(weight)[0].zero_()


@dataclass(frozen=True)
class Stored:
    """A tensor of a model that is stored, sharded or not, and the tensors on disk that make it up."""

    tensor: Tensor
    pieces: tuple[DiskTensor, ...]
    is_parameter: bool


class FSDPWeights:
    """Streams a sharded model's weights or gradients, one full tensor at a time, in the order of the model.

    Args:
        model: materialised.
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


def _check_piece(files: TensorFiles, key: str, piece: DiskTensor, folder: Path) -> None:
    if key not in files:
        raise ValueError(f"{folder} has no {key!r}, which the model needs: these are the weights of another model")
    if files.shape(key) != piece.shape:
        raise ValueError(
            f"{files.file_of(key)}: {key!r} has shape {list(files.shape(key))}, but the model needs {list(piece.shape)}"
        )


def _key_on_disk(files: TensorFiles, piece: DiskTensor, tied: list[str]) -> str:
    """The key of a piece: its own, or that of a weight tied to it, where a file holds only that one."""
    if piece.name in files:
        return piece.name
    return next((other for other in tied if other in files), piece.name)


def _tied_names(model: PackedCausalLM) -> dict[str, list[str]]:
    """For each parameter with several names, by its first one, the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.hf.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _is_ignored(model: PackedCausalLM, key: str) -> bool:
    """Whether files of this model may hold a key that it does not use: old rotary buffers, and what transformers ignores."""
    ignored = [r"rotary_emb\.inv_freq$", *(getattr(model.hf, "_keys_to_ignore_on_load_unexpected", None) or ())]
    return any(re.search(pattern, key) for pattern in ignored)


def _fill(tensor: Tensor, keyed: list[tuple[str, DiskTensor]], files: TensorFiles) -> None:
    local, box = local_shard(tensor)
    for key, piece in keyed:
        shared = piece.overlap(box)
        if shared is not None or not box:
            on_disk, in_box = shared or ((), ())
            target = local[in_box]
            target.copy_(files.read(key, on_disk).view(target.shape))
