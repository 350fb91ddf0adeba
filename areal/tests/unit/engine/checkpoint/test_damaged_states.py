"""Damaged pickles in checkpoints: each is an error that names the file, whatever its program does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from areal.engine.checkpoint.dcp import read_metadata
from areal.engine.checkpoint.run_state import read_state

PROGRAMS = {
    "empty": b"",
    "cut": pickle.dumps({"step": 3})[:-4],
    "number": b"I1x\n.",
    "stack": b".",
    "memo": b"h\x09.",
    "call": b"cbuiltins\nlen\n).R.",
    "module": b"cno_such_module\nName\n.",
    "text": b"\x8c\x02\xff\xff.",
}
"""Contents that end in different errors."""


def metadata_of(folder: Path) -> Any:
    return read_metadata(folder)


def state_of(folder: Path) -> Any:
    return read_state(folder / ".metadata")


@pytest.mark.parametrize("read", [metadata_of, state_of])
@pytest.mark.parametrize("program", PROGRAMS)
def test_damaged_pickle_names_its_file(program: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(PROGRAMS[program])
    with pytest.raises(ValueError, match=r"\.metadata is damaged: \w+"):
        read(tmp_path)


def test_metadata_with_one_changed_byte_is_read_or_named(tmp_path: Path) -> None:
    save({"weight": torch.ones(2, 3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    whole = (tmp_path / ".metadata").read_bytes()
    assert list(read_metadata(tmp_path).state_dict_metadata) == ["weight"]
    errors = []
    for place in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[place] ^= 0x20
        (tmp_path / ".metadata").write_bytes(changed)
        try:
            read_metadata(tmp_path)
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) > len(whole) // 20
    assert all(error.startswith(f"{tmp_path / '.metadata'} is damaged: ") for error in errors)
