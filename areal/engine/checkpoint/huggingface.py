"""A checkpoint in the Hugging Face format: what ``transformers.from_pretrained`` loads, with the tokenizer beside it."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from areal.engine.checkpoint.async_save import Observe, SaveTask, WrittenFiles
from areal.engine.checkpoint.atomic_dir import FileRecord, record
from areal.engine.checkpoint.gather_slices import ComputedSlice, Slice, SliceGatherer
from areal.engine.checkpoint.safetensors import (
    INDEX_FILE,
    TensorFiles,
    TensorSpec,
    TensorWriter,
    index_of,
    split_into_files,
)
from areal.engine.model.hub import copy_model_files
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box

VALUE_HEAD = "value_head.weight"
VALUE_HEAD_FILE = "value_head.safetensors"
"""A value head has a file of its own: to transformers, the rest is a causal language model like any other."""

MAX_FILE_BYTES = 5_000_000_000
"""Largest weight file, unless a single tensor is larger."""

# ---- reading


class HFWeights:
    """The weights in a model directory, under the names that the model has for them. A context manager.

    Args:
        folder: with safetensors.
        tied: other names of a weight, where a file may hold one of them or all.
        value_head: whether the model has one.

    Raises:
        ValueError: the files are missing or unreadable.
    """

    def __init__(self, folder: Path, tied: Mapping[str, Sequence[str]], *, value_head: bool) -> None:
        self._folder, self._tied = folder, tied
        self._files = TensorFiles.of_model(folder)
        head = folder / VALUE_HEAD_FILE
        self._head = TensorFiles.of_file(head) if value_head and head.exists() else None

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        if self._head is not None:
            self._head.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]], model: type[PreTrainedModel]) -> None:
        """Compare keys and shapes with those of a model, reading no values.

        Args:
            shapes: of all its weights.
            model: its class, which says what else a file may hold.

        Raises:
            ValueError: these are the weights of another model; names file and key.
        """
        for name, shape in shapes.items():
            if name != VALUE_HEAD:
                self._check_one(self._files, self._key(name), shape)
        known = {name for name in shapes if name != VALUE_HEAD}.union(*self._tied.values())
        extra = [key for key in self._files if key not in known and not _is_ignored(model, key)]
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise ValueError(f"{self._files.file_of(extra[0])} has {extra[0]!r}{more}, which {model.__name__} has not")
        if VALUE_HEAD in shapes and self._head is not None:
            if VALUE_HEAD not in self._head:
                raise ValueError(f"{self._folder / VALUE_HEAD_FILE} has no {VALUE_HEAD!r}")
            self._check_one(self._head, VALUE_HEAD, shapes[VALUE_HEAD])

    def read(self, name: str, box: Box) -> Tensor:
        """A slice of a weight, in the dtype of the file, on the CPU. A value head that has no file is zero."""
        if name != VALUE_HEAD:
            return self._files.read(self._key(name), box)
        if self._head is None:
            return torch.zeros([s.stop - s.start for s in box])
        return self._head.read(name, box)

    def _key(self, name: str) -> str:
        """The key of a weight: its own name, or one that is tied to it, where a file holds only that one."""
        if name in self._files:
            return name
        return next((other for other in self._tied.get(name, ()) if other in self._files), name)

    def _check_one(self, files: TensorFiles, key: str, shape: tuple[int, ...]) -> None:
        if key not in files:
            raise ValueError(
                f"{self._folder} has no {key!r}, which the model needs: these are the weights of another model"
            )
        if files.shape(key) != tuple(shape):
            raise ValueError(
                f"{files.file_of(key)}: {key!r} has shape {list(files.shape(key))}, but the model needs {list(shape)}"
            )


def _is_ignored(model: type[PreTrainedModel], key: str) -> bool:
    """Whether files of this model may hold a key that it does not use: old rotary buffers, and what transformers ignores."""
    ignored = [r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    return any(re.search(pattern, key) for pattern in ignored)


# ---- writing


@dataclass(frozen=True)
class ModelCard:
    """What is written beside the weights.

    Attributes:
        config: goes to ``config.json``. model: its class.
        generation: for models that come without ``generation_config.json``.
    """

    config: PretrainedConfig
    model: type[PreTrainedModel]
    generation: GenerationConfig | None


@dataclass(frozen=True)
class Export:
    """A model as it is to be written.

    Attributes:
        specs: of all weights, in the order of the files; the same on every rank.
        slices: what this rank holds of them, in the dtype of the files.
        card: what is written beside them.
    """

    specs: Sequence[TensorSpec]
    slices: Iterable[Slice | ComputedSlice]
    card: ModelCard


def prepare_hf(
    export: Export,
    control: ControlPlane,
    source: str,
    draft: Path,
    *,
    asynchronous: bool,
    observe: Observe,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SaveTask:
    """Collect weights into the files of a draft. Collective.

    Files go to the ranks in turn. Each tensor on disk is put together from slices by the rank that writes it, and by no other. A rank
    writes a tensor as it comes and holds one of them at a time; if ``asynchronous``, it keeps its files' tensors in host memory for
    the thread that writes them.

    Args:
        source: directory or hub name from which tokenizer files and code are copied.
        max_file_bytes: largest weight file.
    """
    by_name = {spec.name: spec for spec in export.specs}
    head = by_name.pop(VALUE_HEAD, None)
    dtype = next(iter(by_name.values())).dtype
    files = split_into_files(by_name.values(), max_file_bytes)
    index = index_of(files) if len(files) > 1 else None
    if head is not None:
        files[VALUE_HEAD_FILE] = [head]
    writers = {name: i % control.size for i, name in enumerate(files)}
    mine = {name: tensors for name, tensors in files.items() if writers[name] == control.rank}
    sink = _CopySink(draft, mine) if asynchronous else _FileSink(draft, mine)
    _gather_tensors(files, writers, SliceGatherer(export.slices, control), sink, observe)

    def write() -> WrittenFiles:
        written = sink.finish()
        if control.rank == 0:
            names = _write_model_files(export.card, source, dtype, draft)
            if index is not None:
                (draft / INDEX_FILE).write_text(json.dumps(index, indent=2))
                names.append(INDEX_FILE)
            written += [record(draft, name) for name in names]
        return WrittenFiles(written)

    return SaveTask(write, finish=lambda payloads: [], about={"tensors": sum(map(len, files.values()))})


def _gather_tensors(
    files: Mapping[str, Sequence[TensorSpec]],
    writers: Mapping[str, int],
    gatherer: SliceGatherer,
    sink: _FileSink | _CopySink,
    observe: Observe,
) -> None:
    """Pass every tensor of this rank's files on. A fault of this rank's disk waits until all have what they need from it."""
    faults: list[Exception] = []
    for done, (file, spec) in enumerate((file, spec) for file, specs in files.items() for spec in specs):
        tensor = gatherer.gather(spec, writers[file])
        if tensor is not None and not faults:
            try:
                sink.put(file, tensor)
            except (OSError, ValueError) as error:
                faults.append(error)
        if done in (0, 8):
            observe(f"tensor {done}")
    if faults:
        raise faults[0]


class _FileSink:
    """Writes tensors to this rank's files as they come."""

    def __init__(self, draft: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
        self._draft, self._files = draft, files
        self._open: dict[str, TensorWriter] = {}

    def put(self, file: str, tensor: Tensor) -> None:
        if file not in self._open:
            self._open[file] = TensorWriter(self._draft / file, self._files[file])
        self._open[file].write(tensor)

    def finish(self) -> list[FileRecord]:
        for writer in self._open.values():
            writer.close()
        return [FileRecord(name, writer.size, writer.crc32) for name, writer in self._open.items()]


class _CopySink:
    """Keeps tensors, and writes them at the end."""

    def __init__(self, draft: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
        self._files = _FileSink(draft, files)
        self._copies: list[tuple[str, Tensor]] = []

    def put(self, file: str, tensor: Tensor) -> None:
        self._copies.append((file, tensor))

    def finish(self) -> list[FileRecord]:
        for file, tensor in self._copies:
            self._files.put(file, tensor)
        self._copies.clear()
        return self._files.finish()


def _write_model_files(card: ModelCard, source: str, dtype: torch.dtype, draft: Path) -> list[str]:
    """Configuration, generation settings, tokenizer and code of the model. Returns the names of the files."""
    before = set(os.listdir(draft))
    names = copy_model_files(source, draft)
    config = copy.deepcopy(card.config)
    config.dtype = dtype
    config.architectures = [card.model.__name__]
    config.save_pretrained(draft)
    if "generation_config.json" not in names and card.generation is not None:
        card.generation.save_pretrained(draft)
    top = {p.name for p in draft.iterdir() if p.is_file()} - before
    return sorted({*names, *(name for name in top if name.endswith((".json", ".jinja")))})
