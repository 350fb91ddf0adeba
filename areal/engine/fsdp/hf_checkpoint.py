"""A checkpoint in the Hugging Face format: what ``transformers.from_pretrained`` loads, with the tokenizer beside it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from areal.api.weights import NamedTensor
from areal.engine.fsdp.weights import VALUE_HEAD, VALUE_HEAD_FILE, FSDPWeights, model_folder
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
    weights: FSDPWeights,
    control: ControlPlane,
    source: str,
    draft: Path,
    *,
    asynchronous: bool,
    observe: Observe,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Work:
    """Stream the weights, in the dtype of the parameters, into the files of a draft. Collective.

    Files go to the ranks in turn. A rank writes a tensor as it comes and holds one full tensor at a time; if ``asynchronous``, it
    keeps host copies of its files' tensors for the thread that writes them.
    """
    specs = weights.specs()
    files = split_into_files([spec for spec in specs if spec.name != VALUE_HEAD], max_file_bytes)
    has_index = len(files) > 1
    index = index_of(files)
    head = [spec for spec in specs if spec.name == VALUE_HEAD]
    if head:
        files[VALUE_HEAD_FILE] = head
    mine = {name: specs for i, (name, specs) in enumerate(files.items()) if i % control.size == control.rank}
    sink = _Copies(draft, mine) if asynchronous else _Files(draft, mine)
    _stream(weights.named_tensors(), {spec.name: name for name, specs in mine.items() for spec in specs}, sink, observe)

    def write() -> Written:
        written = sink.finish()
        if control.rank == 0:
            names = _write_beside(model, source, draft)
            if has_index:
                (draft / INDEX_FILE).write_text(json.dumps(index, indent=2))
                names.append(INDEX_FILE)
            written += [record(draft, name) for name in names]
        return Written(written)

    return Work(write, finish=lambda payloads: [], about={"tensors": len(specs)})


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
    """Keeps host copies of tensors, and writes them at the end."""

    def __init__(self, draft: Path, files: dict[str, list[TensorSpec]]) -> None:
        self._files = _Files(draft, files)
        self._copies: list[tuple[str, Tensor]] = []

    def put(self, file: str, tensor: Tensor) -> None:
        copied = tensor.cpu()
        self._copies.append((file, copied.clone() if copied is tensor else copied))

    def finish(self) -> list[FileRecord]:
        for file, tensor in self._copies:
            self._files.put(file, tensor)
        self._copies.clear()
        return self._files.finish()


def _stream(tensors: Iterable[NamedTensor], file_of: dict[str, str], sink: _Files | _Copies, observe: Observe) -> None:
    """Pass every tensor of this rank's files on. A fault of this rank's disk waits until the stream, a collective, has ended."""
    faults: list[Exception] = []
    for i, (name, tensor) in enumerate(tensors):
        if name in file_of and not faults:
            try:
                sink.put(file_of[name], tensor)
            except (OSError, ValueError) as error:
                faults.append(error)
        if i in (0, 8):
            observe(f"tensor {i}")
    if faults:
        raise faults[0]


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
