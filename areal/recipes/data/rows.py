"""Rows of a data set, from files of common forms, or as they are."""

from __future__ import annotations

import collections.abc
import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from areal.recipes.functions import did_you_mean, load_function

Row = Mapping[str, Any]
_SUFFIXES = (".jsonl", ".json", ".parquet")


class DataRows(collections.abc.Sequence[Row]):
    """Rows of a data set, with the place of each for messages.

    Args:
        rows: the rows.
        name: where they are from.
        lines: number of the line of each row in the file ``name``; ``None`` without lines.
    """

    def __init__(
        self, rows: collections.abc.Sequence[Row], name: str, lines: collections.abc.Sequence[int] | None = None
    ) -> None:
        self._rows, self.name, self._lines = rows, name, lines

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> str:
        """Return where a row is: file and line, or its number from 0."""
        return f"{self.name}:{self._lines[index]}" if self._lines is not None else f"{self.name}, row {index}"

    def fingerprint(self) -> str:
        """Return the SHA-256 of all rows as JSON with sorted keys and without nulls, in hexadecimal digits.

        Equal for equal rows of any source.
        """
        digest = hashlib.sha256()
        for row in self:
            text = json.dumps(without_nulls(row), sort_keys=True, default=_content, ensure_ascii=False)
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()

    def taken(self, indices: collections.abc.Sequence[int]) -> DataRows:
        """Return some of the rows."""
        lines = None if self._lines is None else [self._lines[i] for i in indices]
        return DataRows([self._rows[i] for i in indices], self.name, lines)

    def renamed(self, columns: Mapping[str, str]) -> DataRows:
        """Return the rows with other names of columns; the others keep theirs.

        Args:
            columns: old name by new name.

        Raises:
            ValueError: the first row lacks a column.
        """
        for old in columns.values():
            if old not in self[0]:
                hint = did_you_mean(old, self[0])
                raise ValueError(f"columns: {self.place(0)} has no column {old!r}, but {sorted(self[0])}{hint}")
        return DataRows(_Renamed(self._rows, columns), self.name, self._lines)


def _content(value: Any) -> str:
    """Return a value that JSON does not have as text: pictures and arrays by their contents, others as they print."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.generic) or not hasattr(value, "tobytes"):
        return str(value)
    kind = value.mode if hasattr(value, "mode") else value.dtype
    return f"{kind} {getattr(value, 'shape', value.size)} {hashlib.sha256(value.tobytes()).hexdigest()}"


class _WithoutNulls(collections.abc.Sequence[Row]):
    """Rows of a table, whose missing values are null, as they were before: without these keys, at any depth."""

    def __init__(self, rows: collections.abc.Sequence[Row]) -> None:
        self._rows = rows

    def __getitem__(self, index: Any) -> Any:
        return without_nulls(self._rows[index])

    def __len__(self) -> int:
        return len(self._rows)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of mappings whose value is ``None``, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(each) for each in value]
    return value


class _Renamed(collections.abc.Sequence[Row]):
    """Rows whose columns are renamed when they are read."""

    def __init__(self, rows: collections.abc.Sequence[Row], columns: Mapping[str, str]) -> None:
        self._rows, self._columns = rows, columns

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        old = set(self._columns.values())
        rest = {name: value for name, value in row.items() if name not in old and name not in self._columns}
        return rest | {new: row[name] for new, name in self._columns.items() if name in row}

    def __len__(self) -> int:
        return len(self._rows)


def read_rows(source: Any) -> DataRows:
    """Return rows.

    Args:
        source: path of a ``.jsonl``, ``.json`` (a list of objects) or ``.parquet`` file; of a directory written by ``datasets``
            (``directory:split`` if it has several splits); ``module:function`` of a function that returns rows; or rows: a sequence of
            mappings, such as a ``datasets.Dataset``.

    Raises:
        ValueError: there is no such file; it has another form (names file and line); there are no rows, or one is no mapping.
    """
    rows = _named(source) if isinstance(source, str | Path) else _passed(source)
    if not len(rows):
        raise ValueError(f"{rows.name} has no rows")
    if not isinstance(rows[0], Mapping):
        raise ValueError(f"{rows.place(0)}: a row is a mapping of columns, and this is a {type(rows[0]).__name__}")
    return rows


def _passed(source: Any) -> DataRows:
    """Return rows that were passed. Those of ``datasets`` are a table."""
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ValueError(f"dataset = {source!r:.80}: pass a sequence of rows, such as a list, or where they are")
    is_table = type(source).__module__.split(".")[0] == "datasets"
    return DataRows(_WithoutNulls(source) if is_table else source, type(source).__name__)


def split_rows(rows: DataRows, held_out: int, seed: int) -> tuple[DataRows, DataRows]:
    """Return rows to train on, and ``held_out`` others that are drawn with ``seed``.

    Raises:
        ValueError: no row would be left to train on.
    """
    if held_out >= len(rows):
        raise ValueError(f"held_out = {held_out}: {rows.name} has {len(rows)} rows, and some are to be trained on")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return rows.taken(sorted(order[held_out:])), rows.taken(sorted(order[:held_out]))


def _named(source: str | Path) -> DataRows:
    text, path = str(source), Path(source)
    if path.is_file():
        return _from_file(path)
    if path.is_dir():
        return _from_directory(path, None)
    folder, colon, part = text.rpartition(":")
    if colon and Path(folder).is_dir():
        return _from_directory(Path(folder), part)
    if colon:
        return DataRows(list(load_function(text)()), text)
    near = map(str, path.parent.iterdir()) if path.parent.is_dir() else ()
    raise ValueError(f"dataset = {text!r}: there is no such file{did_you_mean(str(path), near)}")


def _from_file(path: Path) -> DataRows:
    if path.suffix == ".jsonl":
        return _from_lines(path)
    if path.suffix == ".parquet":
        return DataRows(_WithoutNulls(_saved(path).read_parquet(path)), str(path))
    if path.suffix != ".json":
        raise ValueError(f"dataset = {str(path)!r}: expected a file that ends with {', '.join(_SUFFIXES)}")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of objects; for one object per line, name the file .jsonl")
    return DataRows(rows, str(path))


def _from_lines(path: Path) -> DataRows:
    rows, lines = [], []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}: {line.strip()[:60]!r}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: expected an object such as {{...}}, not a {type(row).__name__}")
            rows.append(row)
            lines.append(number)
    return DataRows(rows, str(path), lines)


def _from_directory(path: Path, split: str | None) -> DataRows:
    data = _saved(path).read_directory(path)
    if not isinstance(data, dict):
        return DataRows(_WithoutNulls(data), str(path))
    splits = sorted(data)
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        raise ValueError(
            f"dataset = {str(path)!r} has the splits {', '.join(splits)}: name one, such as '{path}:{splits[0]}'"
        )
    return DataRows(_WithoutNulls(data[split]), f"{path}:{split}")


def _saved(path: Path) -> Any:
    """Return the module that reads with ``datasets``."""
    try:
        return import_module("areal.recipes.data.saved_datasets")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"dataset = {str(path)!r}: {error.name} is not installed: pip install 'areal[recipes]'"
        ) from None
