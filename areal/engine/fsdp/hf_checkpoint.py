"""A checkpoint in the Hugging Face format: what ``transformers.from_pretrained`` loads, with the tokenizer beside it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

from torch import Tensor

from areal.engine.fsdp.collect import PieceCollector
from areal.engine.fsdp.weights import VALUE_HEAD, VALUE_HEAD_FILE, Stored, model_folder
from areal.engine.model import PackedCausalLM
from areal.engine.publish import FileRecord, record
from areal.engine.safetensors_files import INDEX_FILE, TensorSpec, TensorWriter, index_of, split_into_files
from areal.engine.save_job import Observe, Work, Written
from areal.utils.distributed import ControlPlane

MAX_FILE_BYTES = 5_000_000_000
"""Largest weight file, unless a single tensor is larger."""

_BESIDE_WEIGHTS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""What belongs to a model beside its weights and its configuration, copied from where the model came from."""


def prepare_hf(
    model: PackedCausalLM,
    stored: list[Stored],
    control: ControlPlane,
    source: str,
    draft: Path,
    *,
    asynchronous: bool,
    observe: Observe,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Work:
    """Collect the weights, in the dtype of the parameters, into the files of a draft. Collective.

    Files go to the ranks in turn. Each tensor on disk is put together from the shards by the rank that writes it, and by no other. A rank
    writes a tensor as it comes and holds one of them at a time; if ``asynchronous``, it keeps its files' tensors in host memory for
    the thread that writes them.
    """
    specs = {piece.name: TensorSpec(piece.name, s.tensor.dtype, piece.shape) for s in stored for piece in s.pieces}
    head = specs.pop(VALUE_HEAD, None)
    files = split_into_files(specs.values(), max_file_bytes)
    index = index_of(files) if len(files) > 1 else None
    if head is not None:
        files[VALUE_HEAD_FILE] = [head]
    writers = {name: i % control.size for i, name in enumerate(files)}
    mine = {name: specs for name, specs in files.items() if writers[name] == control.rank}
    sink = _Copies(draft, mine) if asynchronous else _Files(draft, mine)
    file_of = {spec.name: name for name, specs in files.items() for spec in specs}
    _collect(stored, control, {name: (file, writers[file]) for name, file in file_of.items()}, sink, observe)

    def write() -> Written:
        written = sink.finish()
        if control.rank == 0:
            names = _write_beside(model, source, draft)
            if index is not None:
                (draft / INDEX_FILE).write_text(json.dumps(index, indent=2))
                names.append(INDEX_FILE)
            written += [record(draft, name) for name in names]
        return Written(written)

    return Work(write, finish=lambda payloads: [], about={"tensors": len(file_of)})


def _collect(
    stored: list[Stored],
    control: ControlPlane,
    place: dict[str, tuple[str, int]],
    sink: _Files | _Copies,
    observe: Observe,
) -> None:
    """Pass every tensor of this rank's files on. A fault of this rank's disk waits until all have what they need from it."""
    faults: list[Exception] = []
    pieces = PieceCollector([s.tensor for s in stored], control)
    done = 0
    for i, s in enumerate(stored):
        for piece in s.pieces:
            file, writer = place[piece.name]
            tensor = pieces.collect(i, piece, writer)
            if tensor is not None and not faults:
                try:
                    sink.put(file, tensor)
                except (OSError, ValueError) as error:
                    faults.append(error)
            if done in (0, 8):
                observe(f"tensor {done}")
            done += 1
    if faults:
        raise faults[0]


class _Files:
    """Writes tensors to this rank's files as they come."""

    def __init__(self, draft: Path, files: dict[str, list[TensorSpec]]) -> None:
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


class _Copies:
    """Keeps tensors, and writes them at the end."""

    def __init__(self, draft: Path, files: dict[str, list[TensorSpec]]) -> None:
        self._files = _Files(draft, files)
        self._copies: list[tuple[str, Tensor]] = []

    def put(self, file: str, tensor: Tensor) -> None:
        self._copies.append((file, tensor))

    def finish(self) -> list[FileRecord]:
        for file, tensor in self._copies:
            self._files.put(file, tensor)
        self._copies.clear()
        return self._files.finish()


def _write_beside(model: PackedCausalLM, source: str, draft: Path) -> list[str]:
    """Configuration, generation settings, tokenizer and code of the model. Returns the names of the files."""
    before = set(os.listdir(draft))
    folder = model_folder(source)
    names = [name for name in _BESIDE_WEIGHTS if (folder / name).is_file()]
    names += sorted(code.name for code in folder.glob("*.py"))
    for name in names:
        shutil.copyfile(folder / name, draft / name)
    if (folder / "additional_chat_templates").is_dir():
        shutil.copytree(folder / "additional_chat_templates", draft / "additional_chat_templates")
        names += [str(p.relative_to(draft)) for p in sorted((draft / "additional_chat_templates").iterdir())]
    config = copy.deepcopy(model.hf.config)
    config.dtype = next(model.parameters()).dtype
    config.architectures = [type(model.hf).__name__]
    config.save_pretrained(draft)
    if "generation_config.json" not in names and getattr(model.hf, "generation_config", None) is not None:
        model.hf.generation_config.save_pretrained(draft)
    top = {p.name for p in draft.iterdir() if p.is_file()} - before
    return sorted({*names, *(name for name in top if name.endswith((".json", ".jinja")))})
