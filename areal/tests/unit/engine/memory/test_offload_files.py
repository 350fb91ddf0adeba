"""Offload to files on disks that are full, or that cannot reserve space."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.utils.offload import HostMemory


def refuse_with(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_full_disk_raises_before_anything_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk would end the process with SIGBUS in the copy."""
    tensor = torch.arange(1000.0)
    memory = HostMemory({"params": lambda: [tensor]}, str(tmp_path))
    refuse_with(errno.ENOSPC, monkeypatch)
    with pytest.raises(OSError, match=r"No space left on device: 4,000 bytes .* choose another offload_dir"):
        memory.offload(params=True, grads=False, optimizer=False)
    assert torch.equal(tensor, torch.arange(1000.0))
    (folder,) = tmp_path.iterdir()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_disk_that_cannot_reserve_space_is_used(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000.0)
    memory = HostMemory({"params": lambda: [tensor]}, str(tmp_path))
    refuse_with(number, monkeypatch)
    assert memory.offload(params=True, grads=False, optimizer=False) == 4000
    assert memory.onload(params=True, grads=False, optimizer=False) == 4000
    assert torch.equal(tensor, torch.arange(1000.0))
