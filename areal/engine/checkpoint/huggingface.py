"""Checkpoints in the Hugging Face format: a model directory that ``transformers.from_pretrained`` loads, with the tokenizer."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from areal.engine.checkpoint.async_save import SaveTask, WrittenFiles
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
from areal.engine.model.classifier import NO_HEAD, SCORE, VALUE_BIAS, VALUE_HEAD, VALUE_WEIGHT, classifier_class
from areal.engine.model.hub import copy_model_files
from areal.utils.distributed import ControlPlane
from areal.utils.dtensor import Box

logger = logging.getLogger(__name__)

VALUE_HEAD_FILE = "value_head.safetensors"
"""A value head is saved to a separate file, so that transformers loads the rest as an ordinary causal language model."""

MAX_FILE_BYTES = 5_000_000_000
"""Size of the largest weight file, unless a single tensor is larger."""

# ---- reading


class HFWeights:
    """Weights of a model directory, by the names of the model. A context manager that closes the files.

    Args:
        folder: directory with safetensors files.
        tied: name -> other names of the same weight. Files may contain one or all of them.
        value_head: whether the model has a value head.

    Raises:
        ValueError: the files are missing or unreadable.
    """

    def __init__(self, folder: Path, tied: Mapping[str, Sequence[str]], *, value_head: bool) -> None:
        self._folder, self._tied = folder, tied
        self._files = TensorFiles.of_model(folder)
        head = folder / VALUE_HEAD_FILE
        self._head = TensorFiles.of_file(head) if value_head and head.exists() else None
        self._classifies = value_head and SCORE[VALUE_WEIGHT] in self._files

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        if self._head is not None:
            self._head.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]], model: type[PreTrainedModel]) -> None:
        """Compare keys and shapes with those of a model, without reading values.

        Args:
            shapes: name -> shape of all weights of the model.
            model: class of the model, which lists additional keys that files may contain.

        Raises:
            ValueError: the weights are of another model. The error names file and key.
        """
        # Every weight of the model must be in the files, with its shape.
        expected = {self._key(name): shape for name, shape in shapes.items() if not self._starts_at_zero(name)}
        for key, shape in expected.items():
            self._check_one(self._files, key, shape)
        # Every key of the files must be a weight of the model: extra weights mean another architecture.
        known = set(expected).union(shapes, *self._tied.values())
        extra = [key for key in self._files if key not in known and not _is_ignored(model, key)]
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise ValueError(f"{self._files.file_of(extra[0])} has {extra[0]!r}{more}, which {model.__name__} has not")
        # A missing value head is allowed (it starts at zero), a wrong one is not.
        if self._head is not None:
            for name in sorted(VALUE_HEAD & shapes.keys()):
                if name not in self._head:
                    raise ValueError(f"{self._folder / VALUE_HEAD_FILE} has no {name!r}")
                self._check_one(self._head, name, shapes[name])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a weight in the files; ``None`` for a missing one."""
        files, key = self._place(name)
        return files.shape(key) if files is not None and key in files else None

    def read(self, name: str, box: Box) -> Tensor:
        """Read a slice of a weight, in the dtype of the file, on the CPU. A value head without a file is zero, and the head of a classifier."""
        files, key = self._place(name)
        if files is None or (key not in files and self._starts_at_zero(name)):
            return torch.zeros([len(range(s.start, s.stop, s.step or 1)) for s in box])
        return files.read(key, box)

    def _place(self, name: str) -> tuple[TensorFiles | None, str]:
        """Return the files with a weight, and its key there."""
        own_file = name in VALUE_HEAD and not self._classifies
        return (self._head, name) if own_file else (self._files, self._key(name))

    def _starts_at_zero(self, name: str) -> bool:
        """Return whether the files of the model are without a weight that is zero then."""
        if self._classifies:
            return name == NO_HEAD and name not in self._files
        return name in VALUE_HEAD

    def _key(self, name: str) -> str:
        """Return the key of a weight in the files: its name, or a tied name if the files contain only that one."""
        if self._classifies and name in SCORE:
            return SCORE[name]
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
    """Return whether an unknown key is harmless: an old rotary buffer, or a key that transformers ignores for this class."""
    ignored = [r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    return any(re.search(pattern, key) for pattern in ignored)


# ---- writing


@dataclass(frozen=True)
class ModelCard:
    """Settings of a model that are written next to the weights.

    Attributes:
        config: configuration, for ``config.json``.
        model: class of the model.
        generation: generation settings, written if the source of the model is without ``generation_config.json``.
    """

    config: PretrainedConfig
    model: type[PreTrainedModel]
    generation: GenerationConfig | None


@dataclass(frozen=True)
class Export:
    """A model to write.

    Attributes:
        specs: specs of all weights, in the order of the files. The same on every rank.
        slices: slices of this rank, in the dtype of the files.
        card: settings of the model.
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
    chat_template: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SaveTask:
    """Gather weights and write them into the files of a draft. Collective.

    Files are assigned to ranks in turn. A synchronous save writes each gathered tensor at once, so that a rank needs memory
    for one full tensor. An asynchronous save keeps the tensors of this rank's files in host memory for the writing thread.

    Args:
        export: the model.
        control: control plane over all ranks.
        source: directory or hub name from which tokenizer files and code are copied.
        draft: directory to write into.
        asynchronous: whether the files are written later, in a thread.
        chat_template: text of the chat template, in place of that of ``source``.
        max_file_bytes: size of the largest weight file.
    """
    # 1. Divide the weights into files, and the files among the ranks. The value head gets a separate file, which is not in
    # the index of the model, unless the model is a classifier.
    if classifier_class(export.card.config) is not None:
        export = _as_classifier(export)
    by_name = {spec.name: spec for spec in export.specs}
    head = [by_name.pop(name) for name in (VALUE_WEIGHT, VALUE_BIAS) if name in by_name]
    dtype = next(iter(by_name.values())).dtype
    files = split_into_files(by_name.values(), max_file_bytes)
    index = index_of(files) if len(files) > 1 else None
    if head:
        files[VALUE_HEAD_FILE] = head
    writers = {name: i % control.size for i, name in enumerate(files)}
    own_files = {name: tensors for name, tensors in files.items() if writers[name] == control.rank}

    # 2. Gather tensor by tensor.
    sink = _CopySink(draft, own_files) if asynchronous else _FileSink(draft, own_files)
    faults = _gather_tensors(files, writers, SliceGatherer(export.slices, control), sink)
    control.settle(faults[0] if faults else None)

    # 3. Close the files. The first rank also writes configuration, tokenizer and index.
    def write() -> WrittenFiles:
        written = sink.finish()
        if control.rank == 0:
            names = _write_model_files(export.card, source, dtype, draft, chat_template)
            if index is not None:
                (draft / INDEX_FILE).write_text(json.dumps(index, indent=2))
                names.append(INDEX_FILE)
            written += [record(draft, name) for name in names]
        return WrittenFiles(written)

    return SaveTask(write, finish=lambda payloads: [], about={"tensors": sum(map(len, files.values()))})


def _as_classifier(export: Export) -> Export:
    """Return a model with a value head under the names of a classifier, which has no output head."""
    specs = [replace(spec, name=SCORE.get(spec.name, spec.name)) for spec in export.specs if spec.name != NO_HEAD]
    slices = (
        replace(part, name=SCORE[part.name]) if part.name in SCORE else part
        for part in export.slices
        if part.name != NO_HEAD
    )
    return replace(export, specs=specs, slices=slices)


def _gather_tensors(
    files: Mapping[str, Sequence[TensorSpec]],
    writers: Mapping[str, int],
    gatherer: SliceGatherer,
    sink: _FileSink | _CopySink,
) -> list[Exception]:
    """Gather all tensors of all files, and pass those of this rank's files to ``sink``. Collective.

    Errors of this rank's disk are returned, not raised: until the end, other ranks need its slices.
    """
    faults: list[Exception] = []
    for done, (file, spec) in enumerate((file, spec) for file, specs in files.items() for spec in specs):
        tensor = gatherer.gather(spec, writers[file])
        if tensor is not None and not faults:
            try:
                sink.put(file, tensor)
            except Exception as error:
                faults.append(error)
        logger.debug("%s: tensor %d", file, done)
    return faults


class _FileSink:
    """Writes each tensor to its file at once."""

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
    """Keeps tensors in memory, and writes them all in :meth:`finish`."""

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


def _write_model_files(
    card: ModelCard, source: str, dtype: torch.dtype, draft: Path, chat_template: str | None
) -> list[str]:
    """Write configuration, generation settings, tokenizer and code of the model. Returns the names of the files."""
    before = set(os.listdir(draft))
    # Files of the source first, so that the configuration of this model replaces the one of the source.
    names = copy_model_files(source, draft)
    if chat_template is not None:
        # Tokenizers take this file before a template in their configuration.
        (draft / "chat_template.jinja").write_text(chat_template)
    config = copy.deepcopy(card.config)
    config.dtype = dtype
    config.architectures = [classifier_class(config) or card.model.__name__]
    config.save_pretrained(draft)
    if "generation_config.json" not in names and card.generation is not None:
        card.generation.save_pretrained(draft)
    # save_pretrained() decides on its file names: compare the directory with its earlier content.
    top = {p.name for p in draft.iterdir() if p.is_file()} - before
    return sorted({*names, *(name for name in top if name.endswith((".json", ".jinja")))})
