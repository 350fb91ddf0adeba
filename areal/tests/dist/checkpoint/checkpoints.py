"""Checkpoints that are counted, damaged and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal.api import TrainEngine
from areal.engine.checkpoint import dcp
from areal.tests.harness.tiny import (
    global_batch,
    local_batch,
    loss,
    same_bits,
    weights_of,
)

DCP: Any = "dcp"


def step(engine: TrainEngine, seed: int) -> None:
    engine.train_batch(local_batch(engine, global_batch(seed)), loss)


class Counter:
    """Object with a state, such as a data loader."""

    def __init__(self, count: int = 0, state: Any = None) -> None:
        self.state: Any = {"count": count, "order": torch.arange(count)} if state is None else state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@contextmanager
def unharmed(engine: TrainEngine) -> Iterator[None]:
    """Check that the faults raised inside change no weight and that the engine can go on."""
    before = weights_of(engine)
    yield
    assert same_bits(weights_of(engine), before)
    step(engine, 9)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def contents(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, in full."""
    metadata = dcp.read_metadata(path)
    entries = {key: e for key, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
    tensors = {key: torch.full(entry.size, -1.0, dtype=entry.properties.dtype) for key, entry in entries.items()}
    dcp.read_tensors(path, metadata, tensors)
    return tensors
