"""Safetensors files: read slices of tensors, and write one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFiles:
    """Tensors of several safetensors files, by key. Files stay memory-mapped until :meth:`close`.

    Args:
        files: key -> file.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self._file_of = files
        self._handles: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    @classmethod
    def of_model(cls, folder: Path) -> TensorFiles:
        """Return the weights of a model directory: a single file, or several files with an index.

        Raises:
            ValueError: the directory is without weights, or the index is damaged or names a missing file.
        """
        # A single file.
        index = folder / INDEX_FILE
        if not index.is_file():
            if not (folder / SINGLE_FILE).is_file():
                raise ValueError(_no_weights(folder))
            return cls.of_file(folder / SINGLE_FILE)
        # Several files: the index maps each key to its file.
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{index} is damaged: {type(error).__name__}: {error}") from error
        missing = [name for name in sorted(set(weight_map.values())) if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{index} names {missing[0]}, which is not there")
        return cls({key: folder / name for key, name in weight_map.items()})

    @classmethod
    def of_file(cls, file: Path) -> TensorFiles:
        """Return all tensors of one file."""
        with _reading(file), safe_open(file, framework="pt") as handle:
            return cls(dict.fromkeys(handle.keys(), file))

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap and close the files."""
        self._handles.clear()
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        """Iterate over all keys in alphabetical order."""
        return iter(sorted(self._file_of))

    def __contains__(self, key: str) -> bool:
        return key in self._file_of

    def file_of(self, key: str) -> Path:
        """Return the file that contains ``key``."""
        return self._file_of[key]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading its values."""
        with _reading(self._file_of[key], key):
            return tuple(self._open(self._file_of[key]).get_slice(key).get_shape())

    def read(self, key: str, index: tuple[slice, ...]) -> Tensor:
        """Read a slice of a tensor, in the dtype of the file, on the CPU. Nothing else is read.

        Args:
            key: key of the tensor.
            index: one slice for each dimension. Elements that a step skips are read, too.
        """
        with _reading(self._file_of[key], key):
            handle = self._open(self._file_of[key])
            if not index:
                return handle.get_tensor(key)
            # safetensors does not support steps.
            values = handle.get_slice(key)[tuple(slice(s.start, s.stop) for s in index)]
            return values[tuple(slice(None, None, s.step) for s in index)]

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._handles[file]


@contextlib.contextmanager
def _reading(file: Path, key: str | None = None) -> Iterator[None]:
    """Convert errors of reading a file to a ``ValueError`` that names file and key."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        what = f"{file} cannot be read" if key is None else f"{key!r} cannot be read from {file}"
        raise ValueError(f"{what}: {error}; the file is damaged or incomplete") from error


def _no_weights(folder: Path) -> str:
    """Return the error message for a directory without safetensors, which names weights in another format."""
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".gguf", ".pt", ".pth"))
    if not others:
        return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the directory of a model with its weights"
    return (
        f"{folder} has its weights in {others[0]}, and no {SINGLE_FILE}: convert it once with "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...), and give the new directory"
    )


def split_into_files(tensors: Iterable[TensorSpec], max_bytes: int) -> dict[str, list[TensorSpec]]:
    """Divide tensors into files of at most ``max_bytes`` (or one larger tensor), in order. Returns name -> specs."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in tensors:
        if groups[-1] and size + spec.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    # Names as in transformers: a single file is not numbered.
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def index_of(files: dict[str, list[TensorSpec]]) -> dict[str, Any]:
    """Return the content of the index file for files from :func:`split_into_files`."""
    return {
        "metadata": {"total_size": sum(spec.nbytes for group in files.values() for spec in group)},
        "weight_map": {spec.name: name for name, group in files.items() for spec in group},
    }


class TensorWriter:
    """Writes one safetensors file, tensor by tensor, so that only one tensor needs to be in memory.

    Args:
        file: path of a file that does not exist yet.
        specs: specs of all tensors, in the order in which they are written.

    Attributes:
        size: number of bytes written so far.
        crc32: checksum of these bytes, computed while writing.
    """

    def __init__(self, file: Path, specs: Sequence[TensorSpec]) -> None:
        self._specs = list(specs)
        self._stream: BinaryIO = file.open("xb")
        self.file = file
        self.size = self.crc32 = 0
        # The header contains the offsets of all tensors: shapes and dtypes must be known in advance.
        self._put(_header(self._specs))

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor, from any device.

        Raises:
            ValueError: dtype or shape are not those of the next spec.
        """
        spec = self._specs.pop(0) if self._specs else None
        if spec is None or (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(f"{self.file}: a tensor {tensor.dtype} {tuple(tensor.shape)} where {spec} comes next")
        # As bytes, because numpy does not support bfloat16.
        flat = tensor.detach().cpu().contiguous().view(-1)
        self._put(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Sync the file to disk and close it.

        Raises:
            ValueError: a tensor was not written.
        """
        with self._stream:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        if self._specs:
            raise ValueError(f"{self.file}: {self._specs[0].name} was not written")

    def _put(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self.size += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """Return the header of a safetensors file: its length in eight little-endian bytes, then JSON padded to eight bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Tensors follow the header end to end, in the order of the specs.
    offset = 0
    for spec in specs:
        if spec.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{spec.name} has dtype {spec.dtype}, which is not written to safetensors here")
        entries[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor
    return struct.pack("<Q", len(text)) + text
