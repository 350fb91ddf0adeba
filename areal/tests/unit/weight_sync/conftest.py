"""Fixtures of all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from areal.utils.distributed import ControlPlane, init_default_group


@pytest.fixture
def control() -> Iterator[ControlPlane]:
    """The control plane of a trainer with one rank."""
    had_group = dist.is_initialized()
    init_default_group()
    yield ControlPlane()
    if not had_group:
        dist.destroy_process_group()
