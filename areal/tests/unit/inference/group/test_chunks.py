"""Sizes of the chunks in which weights are sent."""

from __future__ import annotations

import torch

from areal.api.weights import NamedTensor
from areal.inference.http.group.chunk import ChunkMemory, cut_chunks

MB = 2**20


def test_chunks_grow_with_what_was_sent_up_to_the_maximum() -> None:
    """So that a small model is sent in several as well, and a large one in few."""
    tensors = (NamedTensor(f"t{i}", torch.full((MB,), i % 7, dtype=torch.uint8)) for i in range(150))
    memory = ChunkMemory(40 * MB, torch.device("cpu"))
    sizes, values = [], []
    for chunk in cut_chunks(tensors, memory, packed_bytes=2**30):
        (buffer,) = chunk.buffers
        sizes.append(len(buffer) // MB)
        values += buffer[::MB].tolist()
    assert sizes == [16, 16, 16, 24, 36, 40, 2]
    assert values == [i % 7 for i in range(150)]
